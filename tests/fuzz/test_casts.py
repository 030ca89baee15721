"""Casts with arguments good and bad: an error with a message and not a byte changed, or a cast that writes its shard alone."""

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests import casts
from tests.fuzz.call_limits import LENGTHS, SAID, fuzz
from tests.fuzz.hostile_values import Guarded, Shard, master_of, shards, start_of, weight_of
from zerocast import CastPlan, QuantizedWeight, quantize_master_weights
from zerocast.backends.reference.codec import unpack

CALLS = ("plan", "plan", "host", "host without copies")
Lists = tuple[list[Any], list[Any], list[Any]]


class Prepared:
    """The lists of a call, and what their storages held before it."""

    def __init__(self, case: list[Shard]) -> None:
        self.case, self.guards = case, list[Guarded]()
        weights: list[Any] = []
        masters, starts = [], []
        self.values = [torch.randn(torch.Size(shard.shape).numel()) * 3 for shard in case]
        for shard, values in zip(case, self.values, strict=True):
            weight, bytes_ = weight_of(shard, weights)
            master, guarded = master_of(shard, values)
            weights.append(weight)
            masters.append(master)
            starts.append(start_of(shard))
            self.guards += [one for one in (bytes_, guarded) if one is not None]
        self.lists: Lists = weights, masters, starts
        self.masters = [m.detach().clone() if isinstance(m, Tensor) else m for m in masters]
        self.before = [codes(weight) for weight in weights]

    def check_guards(self) -> None:
        assert all(guard.is_intact() for guard in self.guards)
        for now, then in zip(self.lists[1], self.masters, strict=True):
            assert not isinstance(now, Tensor) or torch.equal(now, then)

    def check_unchanged(self) -> None:
        for weight, then in zip(self.lists[0], self.before, strict=True):
            assert then is None or torch.equal(codes(weight), then)  # type: ignore[arg-type]

    def check_written(self) -> None:
        """Check that codes outside of every span are unchanged, and that a whole weight is the unsharded cast."""
        for shard, weight, master, start, values, then in zip(
            self.case, *self.lists, self.values, self.before, strict=True
        ):
            now = codes(weight)
            first = int(start or 0)  # a master of fewer elements may start later than it was cut
            last = first + (0 if master is None else master.numel())
            assert now is not None and then is not None
            assert torch.equal(now[:first], then[:first]) and torch.equal(now[last:], then[last:])
            if (
                (first, last) == (0, values.numel())
                and master.dtype == torch.float32
                and not torch.any(master != values)
            ):
                expected = casts.unsharded(shard.fmt, values.view(shard.shape), shard.nominal)
                assert (casts.raw(weight.rowwise_data) == expected["rowwise_data"].reshape(-1)).all()


def codes(weight: Any) -> Tensor | None:
    """Return a code for each element, flat, or None for what is no weight with bytes."""
    if not isinstance(weight, QuantizedWeight) or weight.is_meta:
        return None
    data = weight.state.rowwise_data.detach().clone()
    return (unpack(data) if weight.format.elements_per_byte == 2 else data).reshape(-1)


def call(name: str, lists: Lists, backend: str | None) -> None:
    if name == "plan":
        plan = CastPlan(*lists, backend=backend)
        plan.cast()
        plan.post_all_gather()
    else:
        quantize_master_weights(*lists, manual_post_all_gather_processing=name == "host")


def check(drawn: tuple[list[Shard], str, str | None]) -> None:
    case, name, backend = drawn
    prepared = Prepared(case)
    try:
        call(name, prepared.lists, backend)
    except SAID as error:
        assert str(error).strip()
        prepared.check_guards()
        prepared.check_unchanged()
        return
    prepared.check_guards()
    prepared.check_written()


@pytest.mark.parametrize("seconds", LENGTHS)
def test_casts(seconds: float) -> None:
    backends = st.sampled_from((None, None, None, "reference", "abacus"))
    cases = st.tuples(st.lists(shards(), max_size=4), st.sampled_from(CALLS), backends)
    fuzz(seconds, cases, check)
