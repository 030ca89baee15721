"""Quantized inputs: the bytes of the specification. Swizzled scales: the order of the specification, made once a cast."""

import importlib
import os
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import casts, devices
from tests.casts import CONTENTS, matrix
from tests.formats import model
from tests.gemm.scaled_mm import places
from zerocast import CastPlan, QuantizedWeight, backends, get_format
from zerocast.backends import reference
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats.element import E4M3, FP8
from zerocast.gemm import inputs, scaling
from zerocast.gemm.torch_api import swizzled, swizzled_scales

FINITE = [name for name in CONTENTS if name not in ("nan", "all_nan", "inf", "minus_inf", "bits")]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def drawn(content: str, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Tensor:
    x = torch.from_numpy(matrix(content, *shape, seed)).to(dtype)
    return torch.where(x.isfinite(), x, 1.0)  # fp16 overflows


class OnGpu:
    """A module of kernels for tensors of the CPU."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._kernels, name)
        return lambda x, *options: [found.cpu() for found in kernel(devices.to_gpu(x), *options)]


ON_A_GPU = [pytest.param(f"{name} on a GPU", marks=pytest.mark.gpu) for name in ("cuda", "triton")]


@pytest.fixture(params=["torch", "triton", *ON_A_GPU])
def quantizers(request: pytest.FixtureRequest) -> Any:
    """The plain operations, the kernels in Triton's interpreter, and all kernels where there is a GPU."""
    if request.param == "torch":
        return inputs
    if request.param.endswith("on a GPU"):
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        name = request.param.split()[0]
        if reason := backends.why_not(name, torch.device("cuda")):
            pytest.skip(reason)
        return OnGpu(importlib.import_module(f"zerocast.gemm.{name}_inputs"))
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton is interpreted when TRITON_INTERPRET=1 is set before it is imported")
    return importlib.import_module("zerocast.gemm.triton_inputs")


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert np.array_equal(casts.raw(found), casts.raw(expected))


@pytest.mark.parametrize("content", FINITE)
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_per_tensor_bytes_are_those_of_a_cast(quantizers: Any, element: str, content: str, seed: int) -> None:
    for dtype in DTYPES:
        x = drawn(content, (24, 80), dtype, seed)
        codes, scale_inv = quantizers.per_tensor(x, FP8[element])
        expected = reference.quantize(get_format("fp8_current", element=element), x, dtype)
        assert_same(codes.view(torch.uint8), expected.rowwise_data)
        assert expected.rowwise_scale_inv is not None
        assert_same(scale_inv, expected.rowwise_scale_inv)


@pytest.mark.parametrize("content", FINITE)
@pytest.mark.parametrize("power_of_2", [False, True])
def test_group_bytes_are_those_of_a_cast(quantizers: Any, power_of_2: bool, content: str, seed: int) -> None:
    """A matrix of one row has blocks of 1x128."""
    fmt = get_format("fp8_block", power_of_2_scale=power_of_2)
    for dtype in DTYPES:
        x = drawn(content, (5, 384), dtype, seed)
        codes, scale_inv = quantizers.groups(x, 128, E4M3, power_of_2)
        for row in range(len(x)):
            expected = reference.quantize(fmt, x[row : row + 1], dtype)
            assert_same(codes[row : row + 1].view(torch.uint8), expected.rowwise_data)
            assert expected.rowwise_scale_inv is not None
            assert_same(scale_inv[row : row + 1], expected.rowwise_scale_inv[:, :3])


@pytest.mark.parametrize("shape", [(1, 128), (3, 640), (1500, 1152)])
def test_inputs_of_any_size_and_alignment(quantizers: Any, shape: tuple[int, int], seed: int) -> None:
    """Larger than what a thread block takes, odd numbers of rows, and storage that begins between two vectors."""
    if isinstance(quantizers, ModuleType) and quantizers is not inputs:
        shape = min(shape[0], 70), min(shape[1], 256)  # interpreted
    x = drawn("wide", (shape[0] + 1, shape[1]), torch.bfloat16, seed).view(-1)[1 : 1 + shape[0] * shape[1]].view(shape)
    for element in FP8.values():
        found = *quantizers.per_tensor(x, element), *quantizers.groups(x, 128, element, True)
        expected = *inputs.per_tensor(x, element), *inputs.groups(x, 128, element, True)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs)


def test_a_tensor_that_does_not_end_with_a_vector(quantizers: Any, seed: int) -> None:
    x = drawn("wide", (7, 13), torch.bfloat16, seed)
    for found, expected in zip(quantizers.per_tensor(x, E4M3), inputs.per_tensor(x, E4M3), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(1, 128), (56, 256), *(pytest.param(one, marks=pytest.mark.long_interpreted) for one in ((128, 128), (200, 384)))],
)
def test_groups_of_rows_and_of_columns(quantizers: Any, shape: tuple[int, int], power_of_2: bool, seed: int) -> None:
    """Both have the bytes of a matrix and of its transpose, or of a weight with 128x128 blocks, padded with zeros. Strides are
    those that a graph is told.
    """
    rows, padded = shape[0], -(-shape[0] // 16) * 16
    fmt = get_format("fp8_block", power_of_2_scale=power_of_2)
    for dtype in DTYPES:
        apart = (torch.randn(shape) * torch.logspace(-3, 3, rows)[:, None]).to(dtype)
        not_finite = apart.clone()
        not_finite[rows // 2, 0] = torch.nan
        for x in (drawn("wide", shape, dtype, seed), apart, not_finite):
            filled = torch.cat((x, torch.zeros(-rows % 128, shape[1], dtype=dtype)))
            of_rows = inputs.groups(filled[:padded], 128, E4M3, power_of_2)
            turned, turned_scale_inv = inputs.groups(filled.t().contiguous(), 128, E4M3, power_of_2)
            found = quantizers.groups_both_ways(x, 128, E4M3, power_of_2, False)
            both = (*of_rows, turned[:, :padded], turned_scale_inv)
            assert_like(found, both, scaling.both_ways_like(x, 128, E4M3, False))
            found = quantizers.groups_both_ways(x, 128, E4M3, power_of_2, True)
            assert_like(found[:2], of_rows, of_rows)
            if x is not not_finite:
                weight = reference.quantize(fmt, filled.t().contiguous(), dtype)
                assert weight.rowwise_scale_inv is not None
                bands = len(filled) // 128
                padding = torch.zeros(shape[1] // 128, -bands % 4)
                scale_inv = torch.cat((weight.rowwise_scale_inv[:, :bands], padding), 1)
                codes = weight.rowwise_data.view(E4M3.dtype)[:, :padded]
                assert_like(found[2:], (codes, scale_inv.t()), scaling.both_ways_like(x, 128, E4M3, True)[2:])
            else:
                assert found[3].isnan().nonzero().tolist() == [[rows // 2 // 128, 0]]


def assert_like(found: Any, expected: Any, like: Any) -> None:
    """Equal values; the strides and dtypes of `like`."""
    for ours, theirs, layout in zip(found, expected, like, strict=True):
        assert ours.dtype == layout.dtype and (ours.stride() == layout.stride() or layout is theirs)
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(ours.float().signbit(), theirs.float().signbit()) or theirs.float().isnan().any()


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(1, 16), (56, 80), (128, 128), (136, 144)])
def test_a_tensor_in_both_directions(quantizers: Any, shape: tuple[int, int], element: str, seed: int) -> None:
    both_ways = getattr(quantizers, "per_tensor_both_ways", None) or (
        lambda x, element: quantizers.tensor_both_ways(x, None, element)
    )
    for dtype in DTYPES:
        x = drawn("wide", shape, dtype, seed)
        codes, scale_inv = inputs.per_tensor(x, FP8[element])
        expected = codes, scale_inv, scaling.turned(codes)
        assert_like(both_ways(x, FP8[element]), expected, scaling.tensor_both_ways_like(x, FP8[element]))
        x[0, 0] = -torch.inf
        assert all(t.float()[:, : shape[0]].isnan().all() for t in both_ways(x, FP8[element])[::2])


@pytest.mark.parametrize("shape", [(40, 256), (256, 128)])
def test_quantizing_in_both_directions_are_ops(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16)
    groups, tensor = torch.ops.zerocast.groups_both_ways.default, torch.ops.zerocast.tensor_both_ways.default
    amax = x.abs().amax().float().view(1)
    for op, arguments, expected in (
        (groups, (x, 128, "e4m3", True, False), inputs.groups_both_ways(x, 128, E4M3, True, False)),
        (groups, (x, 128, "e4m3", True, True), inputs.groups_both_ways(x, 128, E4M3, True, True)),
        (tensor, (x, amax, "e4m3"), inputs.per_tensor_both_ways(x, E4M3)),
    ):
        torch.library.opcheck(op, arguments)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(op(*arguments), expected, strict=True))


@pytest.mark.parametrize("content", FINITE)
def test_what_a_compiler_is_given_are_the_same_bytes(content: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled graph quantizes with plain operators, which it can fuse."""
    x = drawn(content, (256, 384), torch.bfloat16, seed)

    def found() -> list[Tensor]:
        of_tensor = [t for element in FP8.values() for t in inputs.per_tensor(x, element)]
        of_groups = [t for p in (False, True) for t in inputs.groups(x, 128, E4M3, p)]
        return [*of_tensor, *of_groups, scaling.turned(of_tensor[0])]

    expected = found()
    monkeypatch.setattr(inputs, "is_traced", lambda x: True)
    for ours, theirs in zip(found(), expected, strict=True):
        assert ours.stride() == theirs.stride()
        assert_same(ours, theirs)


def test_every_subnormal_of_bf16(quantizers: Any) -> None:
    """Groups whose amax is subnormal: Triton's interpreter converts such bf16 values wrongly if it is left to it."""
    amaxes = torch.arange(1, 128, dtype=torch.int16)
    x = torch.where(torch.arange(128) < 3, amaxes[:, None], 0).to(torch.int16).view(torch.bfloat16)
    (codes, scale_inv), expected = quantizers.groups(x, 128, E4M3, False), inputs.groups(x, 128, E4M3, False)
    assert_same(codes.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scale_inv, expected[1])


def settings(cast: str) -> Any:
    return model.Cast(cast, "bfloat16", model.Settings())


def test_mxfp8_bytes_are_those_of_the_model(seed: int) -> None:
    x = drawn("wide", (64, 96), torch.bfloat16, seed)
    codes, scales = inputs.mxfp8(x)
    expected = settings("mxfp8").of(x.float().numpy())
    assert np.array_equal(casts.raw(codes), expected["rowwise_data"].reshape(-1))
    assert np.array_equal(casts.raw(scales), expected["rowwise_scale_inv"].reshape(-1))


def test_nvfp4_bytes_are_those_of_the_model(seed: int) -> None:
    """The 16 rows of each tile are alike, so its 16x16 blocks are 1x16 blocks."""
    x = drawn("normal", (4, 96), torch.bfloat16, seed).repeat_interleave(16, 0)
    data, scales, factor = inputs.nvfp4(x)
    expected = settings("nvfp4").of(x.float().numpy())
    assert np.array_equal(casts.raw(data), expected["rowwise_data"].reshape(-1))
    assert np.array_equal(casts.raw(scales), expected["rowwise_scale_inv"].reshape(-1))
    assert factor.item() == np.float32(expected["amax"].reshape(-1).view(np.float32)[0] * np.float32(1 / 2688))


def test_nvfp4_blocks_are_rows() -> None:
    x = torch.ones(16, 32).bfloat16()
    x[5, 16:] = 6.0
    _, scales, _ = inputs.nvfp4(x)
    assert scales[5, 1] > scales[5, 0] == scales[4, 1]
    assert scales.shape == (128, 4) and not scales[16:].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_group_that_is_not_finite_is_no_number(quantizers: Any, bad: float) -> None:
    x = torch.randn(4, 256)
    x[2, 130] = bad
    for power_of_2 in (False, True):
        codes, scale_inv = quantizers.groups(x, 128, E4M3, power_of_2)
        assert scale_inv.isnan().nonzero().tolist() == [[2, 1]]
        assert codes[2, 128:].float().isnan().all() and codes[:2].float().isfinite().all()
    codes, scale_inv = quantizers.per_tensor(x, E4M3)
    assert scale_inv.isnan() and codes.float().isnan().all()
    _, scales = inputs.mxfp8(x)
    assert (scales == 0xFF).nonzero().tolist() == [[2, 4]]
    assert inputs.nvfp4(x)[2].isnan()


# --- swizzled scales --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(128, 4), (128, 12), (256, 4), (384, 20)])
def test_the_order_of_swizzled_scales(shape: tuple[int, int]) -> None:
    scales = torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape)
    assert torch.equal(swizzled(scales)[places(*shape)], scales)


def test_the_first_tile_written_out() -> None:
    """Sixteen places by hand, so that the formula in the test and the one in the library cannot be wrong together."""
    scales = (torch.arange(128)[:, None] * 10 + torch.arange(8)).int()
    flat = swizzled(scales)
    assert flat[:16].tolist() == [0, 1, 2, 3, 320, 321, 322, 323, 640, 641, 642, 643, 960, 961, 962, 963]
    assert flat[16:20].tolist() == [10, 11, 12, 13]
    assert flat[512:516].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_scales_are_swizzled_once_a_cast(fmt: str) -> None:
    weight, master = QuantizedWeight.empty((64, 96), fmt), torch.randn(64 * 96)
    plan = CastPlan([weight], [master], [0], ONE_PROCESS)

    def both() -> list[Tensor]:
        found = []
        for columnwise in (False, True):
            _, scale_inv = weight.direction(columnwise)
            assert scale_inv is not None
            turned = columnwise and fmt == "mxfp8"
            found.append(swizzled_scales(weight, columnwise))
            expected = swizzled(scale_inv.t().contiguous() if turned else scale_inv)
            assert torch.equal(found[-1], expected), "fresh"
        return found

    plan.cast()
    plan.post_all_gather()
    first = both()
    assert all(a is b for a, b in zip(first, both(), strict=True))
    master.mul_(torch.logspace(-3, 3, master.numel()))
    plan.cast()
    plan.post_all_gather()
    second = both()
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    weight.copy_(casts.cast_whole(fmt, torch.randn(64, 96)))  # a state dict is loaded: no cast happened
    if fmt == "nvfp4":
        plan.post_all_gather()
    assert not any(torch.equal(a, b) for a, b in zip(second, both(), strict=True))
