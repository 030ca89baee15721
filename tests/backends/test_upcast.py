"""Stage upcast: the E4M3 codes of an mxfp4 or exact nvfp4 weight have its values to the bit, whatever its codes and scales."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import casts, devices, strategies
from tests.backends.test_dequantize import random_buffers, words
from tests.formats import model
from zerocast import get_format
from zerocast.formats.layout import upcast_operand

GUARD = 16
ALL_CODES = (
    torch.arange(256, dtype=torch.uint8).repeat(64).view(32, 512)[:, :16]
)  # a tile of bytes, every code in either half


EXACT = "nvfp4:exact_in_fp8"


def run(
    backend: str,
    data: Tensor,
    scale: Tensor,
    shape: tuple[int, int],
    transposed: bool = False,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes and scales from the stage, with the guards around both checked; of nvfp4 if there is an amax."""
    fmt = get_format("mxfp4" if amax is None else EXACT)
    made = []
    for buffer in upcast_operand(fmt, *(shape[::-1] if transposed else shape)):
        size = math.prod(buffer.shape)
        whole = torch.full((size + 2 * GUARD,), 77, dtype=buffer.dtype)
        made.append((whole, whole[GUARD:-GUARD].view(buffer.shape)))
    (codes, operand), (scales, group_scale_inv) = made
    devices.stage(backend, "upcast")(fmt, data, scale, amax, *shape, transposed, operand, group_scale_inv)
    for whole in (codes, scales):
        assert (whole[:GUARD] == 77).all() and (whole[-GUARD:] == 77).all()
    return operand, group_scale_inv


def values(codes: Tensor, scale: Tensor) -> Tensor:
    """What FP8 codes with a scale for 128x128 stand for, exactly."""
    over = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]
    return codes.view(torch.float8_e4m3fn).double() * over


def tiles_of(exponents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(bytes, scale buffer, exact values) of a weight that holds every code under each of these scales `[down, across]`."""
    down, across = exponents.shape
    data = ALL_CODES.repeat(down, across).contiguous()
    scale = torch.zeros((-(-down * 32 // 128) * 128, -(-across // 4) * 4), dtype=torch.uint8)
    scale[: down * 32, :across] = exponents.repeat_interleave(32, 0)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    value = torch.cat((magnitudes, -magnitudes))[torch.stack((data & 15, data >> 4), 2).flatten(1).long()]
    return data, scale, value * torch.exp2(exponents.double() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)


@pytest.mark.parametrize("transposed", [False, True])
def test_every_code_under_every_scale_that_a_cast_makes(backend_anywhere: str, transposed: bool) -> None:
    """A group for each of the largest exponents 0 to 254, its 16 tiles with exponents down to 14 below."""
    largest = torch.arange(0, 255, 64 if strategies.is_interpreted(backend_anywhere) else 1)
    below = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 0]])
    groups = (largest[:, None, None] - below).clamp(min=0).to(torch.uint8)
    data, scale, exact = tiles_of(groups.permute(1, 0, 2).reshape(4, -1))
    codes, group_scale_inv = run(backend_anywhere, data, scale, tuple(exact.shape), transposed)
    exact = exact.t() if transposed else exact
    found = values(codes, group_scale_inv)
    assert torch.equal(found, exact) and torch.equal(found.signbit(), exact.signbit())
    assert (codes.view(torch.float8_e4m3fn).float().abs() <= 384).all()
    expected = torch.exp2(largest.double() - 127 - 6).float()  # subnormal below an exponent of 7
    assert torch.equal(
        group_scale_inv[: len(largest), 0] if transposed else group_scale_inv[0, : len(largest)], expected
    )


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp4:scale_rounding=floor", EXACT])
def test_the_operand_of_a_cast(backend: str, fmt: str) -> None:
    """Whatever is cast, amaxes of one group from 2**-60 to 2**60 included, for which mxfp4 clamps scales: the dequantized weight
    and the dequantized operand are equal to the bit.
    """
    rows, columns = (16, 16) if fmt == EXACT else (32, 32)
    reach = 20 if fmt == EXACT else 60
    spread = torch.exp2(torch.linspace(-reach, reach, 5 * 7).round()).view(5, 7)
    spread = spread.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    weight = casts.cast_whole(fmt, torch.randn(spread.shape) * spread, backend=backend)
    for columnwise, on_demand in itertools.product((False, True), repeat=2):
        weight.state.columnwise_on_demand = on_demand
        codes, scale = weight.upcast(columnwise)
        expected = weight.read(columnwise, torch.float32)
        found = (
            values(codes, scale) if scale.numel() > 1 else codes.view(torch.float8_e4m3fn).double() * scale
        ).float()
        assert np.array_equal(casts.raw(found.t() if columnwise else found), casts.raw(expected))


@pytest.mark.parametrize("transposed", [False, True])
def test_every_code_under_every_exact_scale(backend_anywhere: str, transposed: bool) -> None:
    """A tile for each of the 36 scales and for 0, in a weight with rows of 72 bytes, whose last groups are smaller: equal to
    `dequantize`.
    """
    down, across = 9, 9
    stored = np.resize(np.append(model.EXACT_CODES, np.uint8(0)), (down, across))
    scale = torch.zeros((-(-down * 16 // 128) * 128, -(-across // 4) * 4), dtype=torch.uint8)
    scale[: down * 16, :across] = torch.from_numpy(stored).repeat_interleave(16, 0)
    data = (torch.arange(128) * 37 % 256).to(torch.uint8).view(16, 8)  # every code in either half
    data = data.repeat(down, across).contiguous()
    shape = down * 16, across * 16
    for amax in (2688.0 * 0.01171875, 2688.0 * 2.0**-126, 2688.0 * 2.0**100):
        tensor_amax = torch.tensor([amax])
        codes, scale_inv = run(backend_anywhere, data, scale, shape, transposed, tensor_amax)
        assert scale_inv.tolist() == [8 * amax / 2688]
        found = codes.view(torch.float8_e4m3fn).float() * scale_inv
        expected = torch.empty(shape)
        fmt = get_format(EXACT)
        devices.stage(backend_anywhere, "dequantize")(fmt, data, scale, tensor_amax, *shape, False, expected)
        assert np.array_equal(casts.raw(found), casts.raw(expected.t() if transposed else expected))


def test_backends_agree(variant: str) -> None:
    """On any bytes, those that no cast makes included."""

    @strategies.examples(variant)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        shape = 32 * data.draw(st.integers(1, 9)), 32 * data.draw(st.integers(1, 9))
        buffers = random_buffers("mxfp4", shape, torch.bfloat16, data.draw(st.integers(0, 2**31)))
        codes, scale = buffers["rowwise_data"], buffers["rowwise_scale_inv"]
        assert codes is not None and scale is not None
        scale[shape[0] :] = 0
        scale[:, shape[1] // 32 :] = 0
        if data.draw(st.booleans()):  # near each other, as in a cast
            scale[: shape[0], : shape[1] // 32].copy_(100 + scale[: shape[0], : shape[1] // 32] % 20)
        scale[: shape[0]] = scale[: shape[0] : 32].repeat_interleave(32, 0)
        lead = data.draw(st.sampled_from([0, 3]))
        moved = torch.zeros(lead + codes.numel(), dtype=torch.uint8)[lead:].view(codes.shape).copy_(codes)
        transposed = data.draw(st.booleans())
        found, expected = (run(name, moved, scale, shape, transposed) for name in (variant, "reference"))
        assert np.array_equal(casts.raw(found[0]), casts.raw(expected[0]))
        assert np.array_equal(words(found[1]), words(expected[1]))

    check()
