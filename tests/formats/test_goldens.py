"""The golden values of goldens.json, every one, through a whole plan on every backend."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import casts
from tests.backends import stages
from tests.casts import TINY, lcg_matrix
from zerocast import CastPlan, QuantizedWeight, get_format
from zerocast.backends.reference.scales import stored_scales
from zerocast.distributed.group import ONE_PROCESS

GOLDENS: dict[str, Any] = json.loads(Path(__file__).with_name("goldens.json").read_text())
TINY_MASTER = torch.from_numpy(TINY)


def lcg(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(lcg_matrix(rows, columns, seed))


def hexes(tensor: torch.Tensor | None) -> str:
    assert tensor is not None
    return casts.raw(tensor).tobytes().hex()


def assert_floats(found: torch.Tensor | None, bits: list[str]) -> None:
    assert found is not None
    assert hexes(found) == hexes(stages.floats(bits))


@pytest.mark.parametrize(
    ("name", "shape"), [("144x272", (144, 272, 0)), ("32x64s1", (32, 64, 1)), ("32x80s2", (32, 80, 2))]
)
def test_input_generator(name: str, shape: tuple[int, int, int]) -> None:
    assert casts.sha(lcg(*shape)) == GOLDENS["input_sha"][name]


@pytest.mark.parametrize(
    ("fmt", "name"),
    [
        ("fp8_delayed", "delayed_2x4_scale64"),
        ("fp8_current:power_of_2_scale=False", "current_2x4_pow2=0"),
        ("fp8_current:power_of_2_scale=True", "current_2x4_pow2=1"),
        ("fp8_block", "block128_2x4"),
    ],
)
def test_a_tiny_weight(backend_anywhere: str, fmt: str, name: str) -> None:
    golden = GOLDENS[name]
    weight = casts.cast_whole(fmt, TINY_MASTER, backend=backend_anywhere, scale=64.0)
    assert hexes(weight.rowwise_data) == golden["data"]
    assert_floats(weight.rowwise_scale_inv, golden["scale_inv"])
    if "amax" in golden:
        assert_floats(weight.amax, golden["amax"])


@pytest.mark.parametrize(
    ("fmt", "shape", "name"),
    [("mxfp8", (32, 64, 1), "mxfp8_32x64"), ("nvfp4", (32, 80, 2), "nvfp4_2d_32x80")],
)
def test_both_directions(backend_anywhere: str, fmt: str, shape: tuple[int, int, int], name: str) -> None:
    golden, weight = GOLDENS[name], casts.cast_whole(fmt, lcg(*shape), backend=backend_anywhere)
    row, column = weight.rowwise_scale_inv, weight.columnwise_scale_inv
    found = [casts.sha(t) for t in (weight.rowwise_data, row, weight.columnwise_data, column)]
    assert found == [golden[key] for key in ("data_sha", "scale_sha", "cdata_sha", "cscale_sha")]
    if "amax" in golden:
        assert_floats(weight.amax, golden["amax"])


def test_delayed_history(backend: str) -> None:
    golden = GOLDENS["delayed_update_max"]
    weight = QuantizedWeight.empty((2, 4), "fp8_delayed:amax_history_len=4")
    assert weight.amax_history is not None and weight.scale is not None
    weight.amax_history.copy_(torch.tensor([6.0, 1.0, 8.0, 2.0]))
    weight.scale.fill_(64.0)
    plan = CastPlan([weight], [TINY_MASTER.view(-1)], [0], ONE_PROCESS, backend=backend)
    plan.cast()
    assert weight.amax_history.tolist() == golden["history"]
    assert_floats(weight.scale, golden["scale"])


@pytest.mark.long_interpreted
@pytest.mark.parametrize("pow2", [False, True])
def test_block(backend_anywhere: str, pow2: bool) -> None:
    golden = GOLDENS[f"block128_144x272_pow2={int(pow2)}"]
    weight = casts.cast_whole(f"fp8_block:power_of_2_scale={pow2}", lcg(144, 272, 0), backend=backend_anywhere)
    assert weight.rowwise_scale_inv is not None
    assert list(weight.rowwise_scale_inv.shape) == golden["shape"]
    assert_floats(weight.rowwise_scale_inv, golden["scale_inv"])
    assert casts.sha(weight.rowwise_data) == golden["data_sha"]


def incumbent_exponents(amax: torch.Tensor) -> torch.Tensor:
    """Return biased exponents as the reference in TransformerEngine's test of its 2-D MXFP8 quantization
    computes them: the amax is divided by 448, the exponent rounded up unless it is the last or the quotient
    is at most half the smallest normal number.
    """
    quotient = (amax / 448.0).contiguous().view(torch.int32)
    exponent, mantissa = quotient >> 23, quotient & 0x7FFFFF
    stays = (mantissa == 0) | (exponent == 254) | ((exponent == 0) & (mantissa <= 0x400000))
    return torch.where(stays, exponent, exponent + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long_interpreted)])
def test_square_mxfp8_is_that_of_the_incumbent(backend_anywhere: str, dtype: torch.dtype) -> None:
    """Codes agree, and so do both directions' scales, each repeated along its 32 rows or columns."""
    for rows, columns in ((64, 64), (96, 288), (352, 64)):
        master = torch.randn(rows, columns, generator=torch.Generator().manual_seed(9012)) * torch.logspace(
            -3, 3, columns
        )
        weight = casts.cast_whole("mxfp8:block=32x32", master, dtype, backend=backend_anywhere)
        tiles = master.to(dtype).float().unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
        scale = incumbent_exponents(tiles.abs().amax((1, 3)))
        codes = (tiles / torch.exp2(scale.double() - 127).float()[:, None, :, None]).to(torch.float8_e4m3fn)
        assert torch.equal(weight.rowwise_data, codes.view(rows, columns).view(torch.uint8))
        row, column = weight.rowwise_scale_inv, weight.columnwise_scale_inv
        assert row is not None and column is not None
        assert torch.equal(row[:rows, : columns // 32], scale.repeat_interleave(32, 0))
        assert torch.equal(column[: rows // 32, :columns], scale.repeat_interleave(32, 1))


def test_square_mxfp8_has_the_scale_of_the_incumbent_for_every_amax() -> None:
    """Dividing by 448 and multiplying by 1/448 give one exponent for every positive finite bf16 number."""
    amaxes = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()[:, None]
    found = stored_scales(get_format("mxfp8:block=32x32"), amaxes, None, None)
    assert torch.equal(found.int(), incumbent_exponents(amaxes))


@pytest.mark.parametrize("rounding", ["up", "floor"])
def test_mxfp4_is_exact_in_fp8(rounding: str) -> None:
    """Every code under every exponent, the clamp included, is an E4M3 number under one scale a 128x128 block."""
    master = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).repeat(160, 18)
    exponents = torch.arange(5 * 9).view(5, 9) * 6 - 130  # of tiles: the whole range of f32
    master *= torch.exp2(exponents.float().clamp(-126, 125)).repeat_interleave(32, 0).repeat_interleave(32, 1)
    weight = casts.cast_whole(f"mxfp4:scale_rounding={rounding}", master, torch.float32)
    assert weight.rowwise_scale_inv is not None
    b = weight.rowwise_scale_inv[:160:32, :9].int()
    for rows in (slice(0, 4), slice(4, 5)):
        for columns in (slice(0, 4), slice(4, 8), slice(8, 9)):
            part = weight.read(columnwise=False, dtype=torch.float32).view(5, 32, 9, 32)[rows, :, columns]
            e = int(b[rows, columns].max())
            assert int(b[rows, columns].min()) >= e - 14
            operand = part.double() / 2.0 ** (e - 127 - 6)
            assert torch.equal(operand.float().to(torch.float8_e4m3fn).double(), operand)
            assert operand.abs().max() <= 384


@pytest.mark.parametrize("golden", GOLDENS["nvfp4_block_scale_order"], ids=lambda g: str(g["te"]))
def test_nvfp4_scale_order(backend_anywhere: str, golden: dict[str, Any]) -> None:
    stored, amax = stages.scales(backend_anywhere, "nvfp4", torch.tensor([golden["block_amax"], golden["global_amax"]]))
    assert amax.item() == golden["global_amax"]
    assert stored[0].item() == golden["te"]


def test_nvfp4_encode_order(backend_anywhere: str) -> None:
    golden = GOLDENS["nvfp4_encode_order"]
    master = torch.zeros(16, 32)
    master[0, :5] = torch.tensor([*golden["x"], golden["block_amax"]])
    master[0, 16] = golden["global_amax"]
    weight = casts.cast_whole("nvfp4", master, backend=backend_anywhere)
    assert weight.rowwise_scale_inv is not None
    assert weight.rowwise_scale_inv[0, 0].item() == golden["scale_code"]
    low, high = weight.rowwise_data[0, :2] & 15, weight.rowwise_data[0, :2] >> 4
    assert hexes(torch.stack((low, high), -1)) == golden["te_codes"]


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
def test_special_values(backend_anywhere: str, element: str) -> None:
    x = torch.tensor([float(value) for value in GOLDENS["specials"]["x"]])
    assert hexes(stages.encode(backend_anywhere, element, x)) == GOLDENS["specials"][element]


def test_e2m1_ties(backend_anywhere: str) -> None:
    golden = GOLDENS["e2m1_ties"]
    assert hexes(stages.encode(backend_anywhere, "e2m1", torch.tensor(golden["x"]))) == golden["codes"]


def test_e8m0_of_amax(backend_anywhere: str) -> None:
    golden = GOLDENS["e8m0_of_amax"]
    amaxes = torch.tensor([float(value) for value in golden["amax"]])
    assert hexes(stages.scales(backend_anywhere, "mxfp8", amaxes)[0]) == golden["code"]


@pytest.mark.parametrize(("pow2", "key"), [(True, "scale"), (False, "scale_f32")])
def test_block_scale_of_amax(backend_anywhere: str, pow2: bool, key: str) -> None:
    golden = GOLDENS["block_scale_pow2_of_amax"]
    amaxes = torch.tensor([float(value) for value in golden["amax"]])
    stored, _ = stages.scales(backend_anywhere, f"fp8_block:power_of_2_scale={pow2}", amaxes)
    expected = torch.from_numpy(np.float32(1) / stages.floats(golden[key]).numpy())
    assert hexes(stored) == hexes(expected)


def test_identity(backend_anywhere: str) -> None:
    master = lcg(5, 7, 3)
    weight = casts.cast_whole("identity", master, backend=backend_anywhere)
    assert hexes(weight.rowwise_data) == hexes(master.bfloat16())
    assert weight.rowwise_scale_inv is weight.columnwise_data is weight.columnwise_scale_inv is weight.amax is None
