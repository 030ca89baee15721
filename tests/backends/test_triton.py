"""The Triton backend in its interpreter: every format and stage, and how launches are prepared."""

import gc
import importlib

import pytest
import torch

from tests import casts
from tests.backends.stages import Bench, row, table
from tests.backends.test_backends import assert_equal_stages
from tests.casts import Weight
from tests.devices import CPU
from tests.observed import HostTraffic
from tests.selection import some
from zerocast import CastPlan, QuantizedWeight, backends, get_format
from zerocast.backends.descriptor import WIDTH
from zerocast.distributed.group import ONE_PROCESS

REASON = backends.why_not("triton", CPU)
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"triton: {REASON}")

SHAPES = {"mxfp8": (64, 160), "mxfp4": (160, 96), "nvfp4": (48, 288), "int4": (61, 160), "fp8_block": (150, 133)}


CONTENTS = ("wide", "bits", "normal", "nan")


def bench_of(fmt: str, nominal: torch.dtype, seed: int, nominal_master: bool) -> Bench:
    """A whole weight, one with an odd cut at both ends, one without an owned element, one element."""
    shape = SHAPES.get(fmt.split(":", maxsplit=1)[0], (61, 150))
    numel = shape[0] * shape[1]
    spans = ((0, numel), (1, numel - 2), (5, 5), (numel // 2 + 1, numel // 2 + 2))
    weights = [
        Weight(fmt, shape, (span,), nominal, content, seed, nominal_master)
        for span, content in zip(spans, CONTENTS, strict=True)
    ]
    return Bench(tuple(weights), seed, separate_shards=nominal_master)


EVERY_RUN = ("fp8_current", "mxfp8", "mxfp4", "nvfp4", "int4")


@pytest.mark.parametrize("fmt", some({fmt: fmt for fmt in casts.FORMATS}, *EVERY_RUN))
def test_every_format(fmt: str, seed: int) -> None:
    """With one of the nominal dtypes; `test_any_weights` has them all."""
    assert_equal_stages(bench_of(fmt, casts.NOMINAL[seed % 3], seed, seed % 2 == 0), "triton")


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_a_shared_amax_of_16_bits(offset: int) -> None:
    """The 32-bit word around it is swapped: its other half, before or behind, keeps its value."""
    x, numel = torch.linspace(1, 3, 20_000), 10_000
    whole = torch.full((6,), 9.0, dtype=torch.bfloat16)
    packed = whole[1:] if offset % 2 else whole[:5]
    packed[offset] = 0
    where = {"rows": 1, "columns": 2 * numel, "numel": numel, "master_base": 0, "row_amax": offset}
    rows = table(*[row(**where, start=start, master_offset=start) for start in (0, numel)])
    backends.load("triton").partial_amax(get_format("fp8_current"), torch.bfloat16, [x], rows, packed)
    assert packed[offset] == 3.0
    assert (whole == 9).sum() == 5


def test_a_tiling_lives_as_long_as_its_table() -> None:
    from zerocast.backends.triton import launch, tiles

    table = torch.zeros(3, WIDTH, dtype=torch.int64)
    gc.collect()
    before = len(launch._tilings)
    assert launch.tiling(table, tiles.Flat(64)) is launch.tiling(table, tiles.Flat(64))
    assert len(launch._tilings) == before + 1
    del table
    gc.collect()
    assert len(launch._tilings) == before


def test_nobody_gets_the_interpreter_by_accident() -> None:
    assert backends.choose(CPU) != "triton"
    assert all(backends.load("triton").PREFERENCE < backends.load(name).PREFERENCE for name in ("cpu", "reference"))
    assert backends.choose(CPU, "triton") == "triton"
    assert backends.why_not("triton", torch.device("cuda")) == "is for cpu tensors"


def test_a_repeated_cast_brings_nothing_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses and tilings are found again through the ops. The interpreter, which copies its arguments, is left out."""
    weights = [QuantizedWeight.empty((32, 64), fmt, torch.bfloat16) for fmt in casts.FORMATS]
    masters = [torch.randn(2048) for _ in weights]
    plan = CastPlan(weights, masters, [0] * len(weights), ONE_PROCESS, backend="triton")
    skip = torch.tensor([False])
    launched: list[str] = []
    executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    monkeypatch.setattr(executor, "__call__", lambda self, *_, **__: launched.append(self.fn.__name__))
    for _ in range(2):  # the first gives columnwise copies their storage
        plan.cast(skip=skip)
        plan.post_all_gather()
    launched.clear()
    with HostTraffic() as traffic:
        plan.cast(skip=skip)
        plan.post_all_gather()
    assert traffic.found == []
    assert len(launched) > len(casts.FORMATS)
