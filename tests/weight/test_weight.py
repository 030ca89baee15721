"""QuantizedWeight as a tensor: its buffers, what moves it as a whole, and everything that must raise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerocast
from tests import casts
from tests.matrices import lcg_matrix
from zerocast import QuantizedWeight, get_format
from zerocast.formats.layout import BUFFERS

SHAPE = (32, 64)


def cast(
    fmt: str = "nvfp4", shape: tuple[int, ...] = SHAPE, nominal: torch.dtype = torch.bfloat16, seed: int = 0
) -> QuantizedWeight:
    rows, columns = shape[-2] * (shape[0] if len(shape) > 2 else 1), shape[-1]
    return casts.cast_whole(fmt, torch.from_numpy(lcg_matrix(rows, columns, seed)).view(shape), nominal)


LAYOUTS: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype] | None]] = {
    "fp8_delayed": {
        "rowwise_data": ((160, 96), torch.uint8),
        "rowwise_scale_inv": ((1,), torch.float32),
        "columnwise_data": ((96, 160), torch.uint8),
        "columnwise_scale_inv": ((1,), torch.float32),
        "amax": ((1,), torch.float32),
        "scale": ((1,), torch.float32),
        "amax_history": ((1024,), torch.float32),
    },
    "fp8_current": {
        "rowwise_data": ((160, 96), torch.uint8),
        "rowwise_scale_inv": ((1,), torch.float32),
        "columnwise_data": ((96, 160), torch.uint8),
        "columnwise_scale_inv": ((1,), torch.float32),
        "amax": ((1,), torch.float32),
    },
    "fp8_block": {
        "rowwise_data": ((160, 96), torch.uint8),
        "rowwise_scale_inv": ((2, 4), torch.float32),
        "columnwise_data": ((96, 160), torch.uint8),
        "columnwise_scale_inv": ((1, 4), torch.float32),
    },
    "mxfp8": {
        "rowwise_data": ((160, 96), torch.uint8),
        "rowwise_scale_inv": ((256, 4), torch.uint8),
        "columnwise_data": ((160, 96), torch.uint8),
        "columnwise_scale_inv": ((8, 128), torch.uint8),
    },
    "nvfp4": {
        "rowwise_data": ((160, 48), torch.uint8),
        "rowwise_scale_inv": ((256, 8), torch.uint8),
        "columnwise_data": ((96, 80), torch.uint8),
        "columnwise_scale_inv": ((128, 12), torch.uint8),
        "amax": ((1,), torch.float32),
    },
    "identity": {"rowwise_data": ((160, 96), torch.float16)},
}


@pytest.mark.parametrize("fmt", LAYOUTS)
def test_layouts(fmt: str) -> None:
    """docs/formats/common.md; columnwise data and scales exist after post-all-gather processing, or, for mxfp8, from the start."""
    empty, after = QuantizedWeight.empty((160, 96), fmt, torch.float16), cast(fmt, (160, 96), torch.float16)
    for name in BUFFERS:
        expected, buffer, early = LAYOUTS[fmt].get(name), getattr(after, name), getattr(empty, name)
        assert (buffer is None) == (expected is None), name
        if buffer is not None:
            assert (tuple(buffer.shape), buffer.dtype) == expected, name
            assert buffer.is_contiguous()
        if name == "columnwise_data":
            assert (early is None) == (fmt != "mxfp8")


@pytest.mark.parametrize("fmt", casts.FORMATS)
@pytest.mark.parametrize("nominal", casts.NOMINAL)
def test_it_looks_like_the_tensor_that_it_stands_for(fmt: str, nominal: torch.dtype) -> None:
    weight = cast(fmt, (2, 128, 64), nominal)
    assert isinstance(weight, Tensor)
    assert weight.dtype is nominal
    assert weight.device == torch.device("cpu")
    assert weight.format == get_format(fmt)
    assert weight.stride() == torch.empty(weight.shape).stride()
    assert weight.is_leaf
    assert not weight.requires_grad
    assert weight.dequantize().dtype is nominal
    assert weight.dequantize().shape == weight.shape
    assert type(weight.dequantize()) is Tensor


def test_repr_says_what_it_is_and_not_what_it_holds() -> None:
    weight = cast("fp8_block:element=e5m2")
    assert (
        repr(weight)
        == "QuantizedWeight(shape=(32, 64), format=fp8_block:element=e5m2, dtype=torch.bfloat16, device=cpu)"
    )
    assert "QuantizedWeight" in repr(nn.Parameter(weight))


def test_parameter() -> None:
    weight = cast()
    parameter = nn.Parameter(weight)
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, QuantizedWeight)
    assert parameter.requires_grad
    assert not nn.Parameter(weight, requires_grad=False).requires_grad
    assert parameter.rowwise_data is weight.rowwise_data
    parameter.requires_grad_(False)
    assert not parameter.requires_grad
    assert parameter.detach().rowwise_data is weight.rowwise_data


x = torch.randn(64, 32)
FORBIDDEN: dict[str, Callable[[Any], Any]] = {
    "add": lambda w: w + 1,
    "add to a tensor": lambda w: x.t() + w,
    "mul": lambda w: 2 * w,
    "neg": lambda w: -w,
    "abs": lambda w: w.abs(),
    "sum": lambda w: w.sum(),
    "mean": lambda w: w.mean(),
    "norm": lambda w: w.norm(),
    "linalg norm": lambda w: torch.linalg.vector_norm(w),
    "max": lambda w: w.max(),
    "isnan": lambda w: w.isnan(),
    "eq": lambda w: w == 0,
    "equal": lambda w: torch.equal(w, w),
    "index": lambda w: w[0],
    "index put": lambda w: w.__setitem__(0, 0.0),
    "reshape": lambda w: w.reshape(-1),
    "other view": lambda w: w.view(64, 32),
    "flatten": lambda w: w.flatten(),
    "transpose of one dimension": lambda w: w.transpose(0, 0),
    "permute": lambda w: w.permute(1, 0),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "chunk": lambda w: w.chunk(2),
    "split": lambda w: w.split(16),
    "cat": lambda w: torch.cat([w, w]),
    "stack": lambda w: torch.stack([w, w]),
    "where": lambda w: torch.where(torch.ones(32, 64, dtype=torch.bool), w, 0),
    "zeros_like": lambda w: torch.zeros_like(w),
    "empty_like": lambda w: torch.empty_like(w),
    "new_zeros": lambda w: w.new_zeros(3),
    "fill_": lambda w: w.fill_(1),
    "zero_": lambda w: w.zero_(),
    "normal_": lambda w: w.normal_(),
    "mul_": lambda w: w.mul_(0.5),
    "copy_ of a tensor": lambda w: w.copy_(x.t()),
    "copy into a tensor": lambda w: torch.empty(32, 64).copy_(w),
    "init": lambda w: nn.init.xavier_uniform_(w),
    "out": lambda w: torch.add(x.t(), 1, out=w),
    "to dtype": lambda w: w.to(torch.float32),
    "float": lambda w: w.float(),
    "numpy": lambda w: w.numpy(),
    "tolist": lambda w: w.tolist(),
    "embedding": lambda w: F.embedding(torch.tensor([0]), w),
    "conv": lambda w: F.conv1d(x.view(1, 32, 64), w.view(32, 64, 1)),
    "bilinear": lambda w: F.bilinear(x, x, w),
    "einsum": lambda w: torch.einsum("ij,jk->ik", w, x),
    "bmm": lambda w: torch.bmm(w, x),
    "first operand of mm": lambda w: w @ x,
    "first operand of linear": lambda w: F.linear(w, x.t()),
    "first operand of addmm": lambda w: torch.addmm(w, x.t(), x),
    "bias": lambda w: F.linear(x, x, w),
    "both operands": lambda w: w @ w.t(),
    "scaled addmm": lambda w: torch.addmm(torch.zeros(32, dtype=torch.bfloat16), x.bfloat16(), w, beta=2),
    "softmax": lambda w: w.softmax(-1),
    "optimizer": lambda w: torch.optim.AdamW([_with_gradient(w)]).step(),
}


def _with_gradient(weight: QuantizedWeight) -> nn.Parameter:
    parameter = nn.Parameter(weight)
    parameter.grad = torch.ones(weight.shape, dtype=weight.dtype)
    return parameter


@pytest.mark.parametrize("name", FORBIDDEN)
@pytest.mark.parametrize("fmt", ["nvfp4", "identity"])
def test_every_other_operator_raises(name: str, fmt: str) -> None:
    weight = cast(fmt)
    before = casts.bytes_of(weight)
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        FORBIDDEN[name](weight)
    casts.assert_same_bytes(casts.bytes_of(weight), before, name)


def test_sharing_memory_is_refused() -> None:
    model = zerocast.quantize_(nn.Linear(64, 32), zerocast.Recipe({"*": "nvfp4"}))
    with pytest.raises(RuntimeError, match="cannot be shared between processes"):
        model.share_memory()


def test_the_message_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"aten.sum.* not defined on a QuantizedWeight.*dequantize\(\)"):
        cast().sum()
    with pytest.raises(RuntimeError, match="nominal dtype of a QuantizedWeight is fixed"):
        cast().float()


@pytest.mark.parametrize("fmt", casts.FORMATS)
def test_rebind_keeps_the_bytes(fmt: str) -> None:
    weight = cast(fmt, nominal=torch.float32)
    before = casts.bytes_of(weight)
    rows = weight.rowwise_data
    target = torch.empty(rows.numel() + 8, dtype=rows.dtype)[8:].view(rows.shape)
    columns = None if weight.columnwise_data is None else torch.empty_like(weight.columnwise_data)
    weight.rebind(rowwise_data=target, columnwise_data=columns)
    assert weight.rowwise_data.data_ptr() == target.data_ptr()
    casts.assert_same_bytes(casts.bytes_of(weight), before)
    rows.view(torch.uint8).fill_(0)
    casts.assert_same_bytes(casts.bytes_of(weight), before)


WRONG_TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda t: torch.empty(t.shape[0], t.shape[1] + 1, dtype=t.dtype),
    "turned": lambda t: torch.empty(t.shape[::-1], dtype=t.dtype),
    "flat": lambda t: torch.empty(t.numel(), dtype=t.dtype),
    "dtype": lambda t: torch.empty(t.shape, dtype=torch.int8),
    "device": lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"),
    "stride": lambda t: torch.empty(t.shape[::-1], dtype=t.dtype).t(),
}


@pytest.mark.parametrize("wrong", WRONG_TARGETS)
def test_rebind_to_the_wrong_storage_moves_nothing(wrong: str) -> None:
    weight = cast()
    before, rows, columns = casts.bytes_of(weight), weight.rowwise_data, weight.columnwise_data
    assert columns is not None
    with pytest.raises(ValueError, match="columnwise_data needs contiguous"):
        weight.rebind(rowwise_data=torch.empty_like(rows), columnwise_data=WRONG_TARGETS[wrong](columns))
    assert weight.rowwise_data is rows
    assert weight.columnwise_data is columns
    casts.assert_same_bytes(casts.bytes_of(weight), before)


def test_rebind_what_the_format_has_not() -> None:
    with pytest.raises(ValueError, match="identity weight has no columnwise_data"):
        cast("identity").rebind(columnwise_data=torch.empty(SHAPE))
