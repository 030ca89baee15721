"""Every backend gives the bytes of the reference in every stage, and every stage writes what is its own and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import casts, strategies
from tests.sharded import Weight
from tests.tables import STAGES, Bench
from zerocast import get_format
from zerocast.layout import Span, byte_range


@st.composite
def benches(draw: st.DrawFn) -> Bench:
    """One to five weights of one format, whole, cut anywhere or not owned, in one table."""
    model = draw(st.sampled_from(casts.FORMATS))
    nominal, nominal_master = draw(st.sampled_from(casts.NOMINAL)), draw(st.booleans())
    weights = []
    for _ in range(draw(st.integers(1, 5))):
        shape = draw(strategies.shapes(model))
        spans = draw(strategies.cuts(shape, draw(st.sampled_from([1, 2, 3, 5]))))
        content, seed = draw(st.sampled_from(strategies.SPECIAL)), draw(st.integers(0, 2**31))
        weights.append(Weight(model, shape, spans, nominal, content, seed, nominal_master))
    return Bench(tuple(weights), draw(st.integers(0, 2**31)), draw(st.booleans()))


def assert_equal_stages(bench: Bench, backend: str) -> None:
    for stage in filter(bench.applies, STAGES):
        found, expected = bench.run(stage, backend), bench.run(stage, "reference")
        for role, bases in expected.items():
            for index, (a, b) in enumerate(zip(found[role], bases, strict=True)):
                casts.assert_same_bytes({role: casts.raw(a)}, {role: casts.raw(b)}, f"{stage}, base {index}")


@given(bench=benches(), threads=st.integers(1, 3))
def test_stage_equals_reference(variant: str, bench: Bench, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_equal_stages(bench, variant)
    finally:
        torch.set_num_threads(before)


LARGE = {
    "fp8_delayed": (3, 70_001),
    "fp8_current": (70_001, 3),
    "fp8_block": (3, 128 * 1030 + 5),
    "mxfp8": (64, 32 * 1030),
    "nvfp4": (48, 16 * 1030),
    "identity": (1, 200_003),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("fmt", LARGE)
def test_large_weights(variant: str, fmt: str, turned: bool, seed: int) -> None:
    """Larger than the pieces that a backend cuts its work into, in each direction."""
    rows, columns = LARGE[fmt][::-1] if turned else LARGE[fmt]
    numel = rows * columns
    weight = Weight(fmt, (rows, columns), ((0, numel),), content="wide", seed=seed)
    assert_equal_stages(Bench((weight, replace(weight, spans=((numel // 3, numel - 1001),))), seed), variant)


@given(bench=benches())
def test_stage_leaves_the_rest(backend_anywhere: str, bench: Bench) -> None:
    """Guards around every buffer, all inputs, and what of the data is not owned: bytes, and halves of bytes."""
    written = {
        "partial_amax": {"packed"},
        "compute_scales": {"row_scale", "column_scale", "amax"},
        "partial_cast": {"row_data", "column_data"},
        "roll_history": {"scale", "history"},
        "transpose": {"column_data", "column_scale"},
    }
    for stage in filter(bench.applies, STAGES):
        after = bench.run(stage, backend_anywhere)
        for role, arena in bench.arenas.items():
            before = arena.bases()
            if stage in ("partial_cast", "roll_history") and role == "amax":
                continue  # an input of these stages, filled in by the bench
            for a, b in zip(arena.outside(after[role]), arena.outside(before), strict=True):
                assert (a == b).all(), f"{stage} wrote into the guards of {role}"
            if role not in written[stage]:
                assert all((casts.raw(a) == casts.raw(b)).all() for a, b in zip(after[role], before, strict=True))
        if stage == "partial_cast":
            assert_only_owned_codes(bench, after)


def assert_only_owned_codes(bench: Bench, after: dict[str, list[torch.Tensor]]) -> None:
    before = bench.arenas["row_data"].bases()
    kept = [np.ones((tensor.numel(), 2), bool) for tensor in before]
    for weight, line in zip(bench.weights, bench.table.tolist(), strict=True):
        span, (base, offset) = Span(*weight.spans[0]), line[8:10]
        if get_format(weight.fmt).bits == 4:
            kept[base].reshape(-1)[2 * offset + span.start : 2 * offset + span.stop] = False
        else:
            first, last = byte_range(bench.fmt, weight.shape, span, bench.nominal)
            kept[base][offset + first : offset + last] = False
    for a, b, mask in zip(after["row_data"], before, kept, strict=True):
        halves = [np.stack((casts.raw(t) & 15, casts.raw(t) >> 4), -1) for t in (a, b)]
        assert (halves[0] == halves[1])[mask].all(), "a code that is not owned was written"


@given(bench=benches())
def test_skip_writes_nothing(backend_anywhere: str, bench: Bench) -> None:
    skip = torch.tensor([True])
    for stage in ("compute_scales", "partial_cast", "roll_history"):
        if bench.applies(stage):
            after = bench.run(stage, backend_anywhere, skip)
            for role in ("row_data", "column_data", "row_scale", "column_scale", "scale", "history"):
                pairs = zip(after[role], bench.arenas[role].bases(), strict=True)
                assert all((casts.raw(a) == casts.raw(b)).all() for a, b in pairs), f"{stage} wrote {role}"


@given(bench=benches())
def test_skip_false_changes_nothing(backend_anywhere: str, bench: Bench) -> None:
    for stage in ("compute_scales", "partial_cast", "roll_history"):
        if bench.applies(stage):
            found, expected = (
                bench.run(stage, backend_anywhere, torch.tensor([False])),
                bench.run(stage, backend_anywhere),
            )
            for role, bases in expected.items():
                assert all((casts.raw(a) == casts.raw(b)).all() for a, b in zip(found[role], bases, strict=True))
