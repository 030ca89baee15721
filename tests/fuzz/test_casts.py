"""Casts with arguments good and bad: an error with a message and not a byte changed, or a cast that writes its shard alone."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests import casts
from tests.fuzz.call_limits import LENGTHS, SAID, fuzz
from tests.strategies import shapes
from zerocast import CastPlan, QuantizedWeight, quantize_master_weights
from zerocast.backends.reference.codec import unpack

FORMATS = (
    "nvfp4",
    "nvfp4:exact_in_fp8=True",
    "mxfp4",
    "mxfp4:exact_in_fp8=False,scale_rounding=floor",
    "int4",
    "mxfp8",
    "mxfp8:block=32x32",
    "fp8_block",
    "fp8_block:power_of_2_scale=False",
    "fp8_current",
    "fp8_current:element=e5m2",
    "fp8_delayed:amax_history_len=3",
    "identity",
)
GUARD = 0xA5
ROOM = 64  # bytes before and behind
MASTERS = ("good",) * 12 + (
    "none",
    "strided",
    "matrix",
    "expanded",
    "double",
    "half",
    "int",
    "short",
    "list",
    "grad",
    "empty",
)
STARTS = ("good",) * 12 + ("none", "negative", "late", "huge", "float", "bool", "text")
WEIGHTS = ("good",) * 12 + ("transposed", "plain", "meta", "same", "none")


@dataclass(frozen=True)
class Shard:
    """One weight with the master of a span of it, as a test is to pass them."""

    fmt: str
    shape: tuple[int, ...]
    nominal: torch.dtype
    span: tuple[int, int]
    offset: int  # of master and bytes in their storages
    weight: str
    master: str
    start: str


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    fmt = draw(st.sampled_from(FORMATS))
    shape = draw(shapes(fmt))
    numel = torch.Size(shape).numel()
    first, last = sorted((draw(st.integers(0, numel)), draw(st.integers(0, numel))))
    return Shard(
        fmt,
        shape,
        draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32))),
        (0, numel) if draw(st.booleans()) else (first, last),
        draw(st.integers(0, 17)),
        draw(st.sampled_from(WEIGHTS)),
        draw(st.sampled_from(MASTERS)),
        draw(st.sampled_from(STARTS)),
    )


class Guarded:
    """A tensor somewhere in a storage, and whether what is around it is as it was."""

    def __init__(self, values: Tensor, offset: int) -> None:
        size = values.element_size()
        before = ROOM + offset * size
        self._bytes = torch.full((before + values.nbytes + ROOM,), GUARD, dtype=torch.uint8)
        self._range = before, before + values.nbytes
        storage = self._bytes.view(torch.uint8)[before : before + values.nbytes]
        self.tensor = torch.empty(0, dtype=values.dtype).set_(
            self._bytes.untyped_storage(), before // size, values.shape, values.stride()
        )
        assert storage.numel() == values.nbytes
        self.tensor.copy_(values)

    def is_intact(self) -> bool:
        first, last = self._range
        return bool((self._bytes[:first] == GUARD).all() and (self._bytes[last:] == GUARD).all())


def master_of(shard: Shard, values: Tensor) -> tuple[Any, Guarded | None]:
    """Return the case's master. `values` are those of the whole weight, flat."""
    good = values[slice(*shard.span)].clone()
    if shard.master == "none":
        return None, None
    if shard.master == "list":
        return good.tolist(), None
    guarded = Guarded(
        good.to({"double": torch.float64, "half": torch.float16, "int": torch.int32}.get(shard.master, torch.float32)),
        shard.offset,
    )
    tensor = guarded.tensor
    made = {
        "strided": lambda: tensor[::2],
        "matrix": lambda: tensor.view(1, -1),
        "expanded": lambda: tensor[:1].expand(tensor.numel()) if tensor.numel() else tensor,
        "short": lambda: tensor[:-1],
        "empty": lambda: tensor[:0],
        "grad": lambda: tensor.requires_grad_(),
    }
    return made.get(shard.master, lambda: tensor)(), guarded


def start_of(shard: Shard) -> Any:
    first = shard.span[0]
    made = {
        "none": None,
        "negative": -1 - first,
        "late": first + 1,
        "huge": 2**63 - 1,
        "float": float(first),
        "text": "0",
    }
    return bool(first) if shard.start == "bool" else made.get(shard.start, first)


def weight_of(shard: Shard, others: list[Any]) -> tuple[Any, Guarded | None]:
    """Return the case's weight, its bytes in a guarded storage."""
    if shard.weight == "plain":
        return torch.zeros(shard.shape), None
    if shard.weight == "none":
        return None, None
    if shard.weight == "same" and others:
        return others[0], None
    if shard.weight == "meta":
        return QuantizedWeight.empty(shard.shape, shard.fmt, shard.nominal, "meta"), None
    weight = QuantizedWeight.empty(shard.shape, shard.fmt, shard.nominal)
    guarded = Guarded(torch.randint(0, 120, weight.rowwise_data.shape).to(weight.rowwise_data.dtype), shard.offset)
    weight.rebind(rowwise_data=guarded.tensor)
    return (weight.t() if shard.weight == "transposed" and len(shard.shape) == 2 else weight), guarded


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
