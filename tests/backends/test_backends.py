"""Every backend gives the bytes of the reference in every stage, and every stage writes what is its own and nothing else."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import casts, devices, strategies
from tests.backends.stages import STAGES, Bench, row, table
from tests.casts import POISON, Sharded, Weight, bit_patterns, expected_of_shards
from zerocast import CastPlan, get_format
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats import layout
from zerocast.formats.layout import Span, byte_range


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


def test_stage_equals_reference(variant: str) -> None:
    @strategies.examples(variant)
    @given(bench=benches(), threads=st.integers(1, 3))
    def check(bench: Bench, threads: int) -> None:
        with devices.threads(threads):
            assert_equal_stages(bench, variant)

    check()


@pytest.mark.long_interpreted
@pytest.mark.long_at_every_level
@pytest.mark.parametrize(
    ("fmt", "turned"),
    [
        *((fmt, number % 2 == 1) for number, fmt in enumerate(strategies.LARGE)),
        *(pytest.param(fmt, number % 2 == 0, marks=pytest.mark.slow) for number, fmt in enumerate(strategies.LARGE)),
    ],
)
def test_large_weights(variant: str, fmt: str, turned: bool, seed: int) -> None:
    """Larger than the pieces that a backend cuts its work into, in each direction."""
    rows, columns = strategies.large(fmt, variant)[:: -1 if turned else 1]
    numel = rows * columns
    weight = Weight(fmt, (rows, columns), ((0, numel),), content="wide", seed=seed)
    assert_equal_stages(
        Bench((weight, replace(weight, spans=((numel // 3, numel - min(1001, numel // 3)),))), seed),
        variant,
    )


@pytest.mark.long_interpreted
@pytest.mark.parametrize("fmt", casts.FORMATS)
def test_spans_that_begin_late(backend_anywhere: str, fmt: str) -> None:
    """In a narrow weight one lane of a warp may process single elements while other lanes process
    aligned vectors.
    """
    shape = (128, 96)
    for start in (1, 2, 3, 4, 8, 97):
        weight = Weight(fmt, shape, ((start, math.prod(shape)),), content="wide", seed=start)
        sharded = Sharded((weight,), 0, str(devices.of(backend_anywhere)))
        plan = CastPlan(sharded.weights, sharded.masters, sharded.starts, ONE_PROCESS, backend=backend_anywhere)
        plan.cast()
        plan.post_all_gather()
        found = casts.bytes_of(sharded.weights[0])
        casts.assert_same_bytes(found, expected_of_shards(weight), f"{fmt} from {start} on")


@pytest.mark.parametrize("fmt", ["fp8_current", "fp8_block", "nvfp4", "identity"])
def test_offsets_beyond_32_bits(variant: str, fmt: str, seed: int) -> None:
    """The last elements of a weight of more than 2**31, whose shard alone is stored: every offset into the weight is large."""
    spec, columns, numel = get_format(fmt), 2**11, 2**11 + 3001
    master, results = torch.from_numpy(bit_patterns(numel, seed)), []
    for name, rows in ((variant, 2**20 + 128), ("reference", 128)):
        span = Span(rows * columns - numel, rows * columns)
        first, last = byte_range(spec, (rows, columns), span, torch.bfloat16)
        where = {"rows": rows, "columns": columns, "start": span.start, "numel": numel, "row_amax": 0, "amax_base": 0}
        where |= {"master_base": 0, "master_offset": 0, "row_data_base": 0, "row_data_offset": -first, "amax_offset": 0}
        packed, line = torch.zeros(layout.amax_counts(spec, rows, columns)[0]), table(row(**where))
        data = torch.full((last - first,), POISON, dtype=torch.uint8)
        if packed.numel():
            devices.stage(name, "partial_amax")(spec, torch.bfloat16, [master], line, packed)
        amax = packed.amax().view(1) if packed.numel() else packed
        outputs = line, [data], [], None
        devices.stage(name, "partial_cast")(spec, torch.bfloat16, [master], packed, [amax], [], *outputs)
        last_rows = packed[-layout.amax_counts(spec, 128, columns)[0] :]
        assert packed.count_nonzero() == last_rows.count_nonzero()
        results.append({"packed": casts.raw(last_rows), "data": casts.raw(data)})
    from_backend, from_reference = results
    casts.assert_same_bytes(from_backend, from_reference, fmt)


def test_stage_leaves_the_rest(backend_anywhere: str) -> None:
    """Guards around every buffer, all inputs, and what of the data is not owned: bytes, and halves of bytes."""

    @strategies.examples(backend_anywhere)
    @given(bench=benches())
    def check(bench: Bench) -> None:
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

    check()


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


def test_skip(backend_anywhere: str) -> None:
    """True writes nothing, False changes nothing."""

    @strategies.examples(backend_anywhere)
    @given(bench=benches())
    def check(bench: Bench) -> None:
        for stage in filter(bench.applies, ("compute_scales", "partial_cast", "roll_history")):
            skipped, found, expected = (
                bench.run(stage, backend_anywhere, skip) for skip in (torch.tensor([True]), torch.tensor([False]), None)
            )
            for role in ("row_data", "column_data", "row_scale", "column_scale", "scale", "history"):
                pairs = zip(skipped[role], bench.arenas[role].bases(), strict=True)
                assert all((casts.raw(a) == casts.raw(b)).all() for a, b in pairs), f"{stage} wrote {role}"
            for role, bases in expected.items():
                assert all((casts.raw(a) == casts.raw(b)).all() for a, b in zip(found[role], bases, strict=True))

    check()
