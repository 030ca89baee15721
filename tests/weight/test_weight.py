"""QuantizedWeight as a tensor: its buffers, what moves it as a whole, and everything that must raise."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import casts
from tests.casts import lcg_matrix
from tests.formats import model
from zerocast import QuantizedWeight, get_format
from zerocast.formats.layout import BUFFERS

SHAPE = (32, 64)


@pytest.mark.parametrize(
    "fmt", ["fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "int4", "identity"]
)
def test_layouts(fmt: str) -> None:
    """docs/formats/common.md; columnwise data and scales exist after post-all-gather processing, or, for mxfp8, from the start."""
    empty, after = QuantizedWeight.empty((160, 96), fmt, torch.float16), casts.example(fmt, (160, 96), torch.float16)
    assert (empty.columnwise_data is None) == (fmt != "mxfp8")
    held = {"scale": (1,), "amax_history": (1024,)} if fmt == "fp8_delayed" else {}
    if fmt == "identity":
        held["rowwise_data"] = (160, 96)
    else:
        settings = model.Settings(power_of_2_scale=fmt == "fp8_block")
        expected = model.Cast(fmt, "float16", settings).of(np.ones((160, 96), np.float32))
        held |= {name: array.shape for name, array in expected.items()}
    found = {name: getattr(after, name) for name in BUFFERS}
    assert {name: tuple(buffer.shape) for name, buffer in found.items() if buffer is not None} == held
    for name, buffer in found.items():
        if buffer is not None:
            assert buffer.is_contiguous() and (name == "rowwise_data" or buffer.dtype.itemsize in (1, 2, 4))
            wanted = (
                {"identity": torch.float16}.get(fmt, torch.uint8) if name.endswith("data") else after.format.scale_dtype
            )
            assert buffer.dtype is (wanted if name.endswith(("data", "inv")) else torch.float32), name


@pytest.mark.parametrize("fmt", casts.FORMATS)
@pytest.mark.parametrize("nominal", casts.NOMINAL)
def test_it_looks_like_the_tensor_that_it_stands_for(fmt: str, nominal: torch.dtype) -> None:
    weight = casts.example(fmt, (2, 128, 64), nominal)
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
    weight = casts.example("fp8_block:element=e5m2")
    assert (
        repr(weight)
        == "QuantizedWeight(shape=(32, 64), format=fp8_block:element=e5m2, dtype=torch.bfloat16, device=cpu)"
    )
    assert "QuantizedWeight" in repr(nn.Parameter(weight))


x = torch.randn(64, 32)
FORBIDDEN: dict[str, Callable[[Any], Any]] = {
    "sum": lambda w: w.sum(),
    "reshape": lambda w: w.reshape(-1),
    "other view": lambda w: w.view(64, 32),
    "transpose of one dimension": lambda w: w.transpose(0, 0),
    "fill_": lambda w: w.fill_(1),
    "copy_ of a tensor": lambda w: w.copy_(x.t()),
    "copy into a tensor": lambda w: torch.empty(32, 64).copy_(w),
    "to dtype": lambda w: w.to(torch.float32),
    "bilinear": lambda w: F.bilinear(x, x, w),
    "first operand of mm": lambda w: w @ x,
    "first operand of linear": lambda w: F.linear(w, x.t()),
    "first operand of addmm": lambda w: torch.addmm(w, x.t(), x),
    "bias": lambda w: F.linear(x, x, w),
    "both operands": lambda w: w @ w.t(),
    "scaled addmm": lambda w: torch.addmm(torch.zeros(32, dtype=torch.bfloat16), x.bfloat16(), w, beta=2),
}


@pytest.mark.parametrize("name", FORBIDDEN)
@pytest.mark.parametrize("fmt", ["nvfp4", "identity"])
def test_what_an_operator_with_a_handler_does_not_do(name: str, fmt: str) -> None:
    """Nothing is written. Operators without a handler: test_unsupported.py."""
    weight = casts.example(fmt)
    before = casts.bytes_of(weight)
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        FORBIDDEN[name](weight)
    casts.assert_same_bytes(casts.bytes_of(weight), before, name)


@pytest.mark.parametrize("fmt", casts.FORMATS)
def test_rebind_keeps_the_bytes(fmt: str) -> None:
    weight = casts.example(fmt, nominal=torch.float32)
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
    weight = casts.example()
    before, rows, columns = casts.bytes_of(weight), weight.rowwise_data, weight.columnwise_data
    assert columns is not None
    with pytest.raises(ValueError, match="columnwise_data needs contiguous"):
        weight.rebind(rowwise_data=torch.empty_like(rows), columnwise_data=WRONG_TARGETS[wrong](columns))
    assert weight.rowwise_data is rows
    assert weight.columnwise_data is columns
    casts.assert_same_bytes(casts.bytes_of(weight), before)


# -- every way by which torch gives a tensor other contents: it takes the right bytes or raises, and never neither


OTHERWISE = {"copy_", "requires_grad_", "detach_"}  # takes bytes, changes none


def cast(seed: int, fmt: str = "nvfp4") -> nn.Parameter:
    """A parameter with a high-precision value, as `quantize_` makes it."""
    value = torch.from_numpy(lcg_matrix(*SHAPE, seed))
    weight = nn.Parameter(casts.cast_whole(fmt, value))
    weight.high_precision_init_val = value
    return weight


@pytest.mark.filterwarnings("ignore:This overload:UserWarning")  # of arguments that torch calls deprecated
def test_every_in_place_method_raises() -> None:
    """Every in-place method raises: for its arguments if none here fit it, else because it writes a
    QuantizedWeight.
    """
    weight, other = cast(0), cast(1)
    before = casts.bytes_of(weight)
    index = torch.zeros(SHAPE, dtype=torch.int64)
    plain, mask = torch.ones(SHAPE, dtype=weight.dtype), torch.ones(SHAPE, dtype=torch.bool)
    arguments: list[tuple[Any, ...]] = [
        (),
        (1.0,),
        (1,),
        (0, 1),
        (mask, 1.0),
        (0, index, plain),
        (0, index[0, :1], 1.0),
    ]
    arguments += [*itertools.product((other, plain)), (other, 0.5), (plain, plain), (other, other)]
    silent: list[str] = []
    names = [name for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_")]
    assert len(names) > 150
    with torch.no_grad():
        for name, given in itertools.product(sorted(set(names) - OTHERWISE), arguments):
            with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
                getattr(weight, name)(*given)
                silent.append(name)
    assert not silent
    casts.assert_same_bytes(casts.bytes_of(weight), before)


def test_the_usual_swap_swaps() -> None:
    a, b = cast(0), cast(1)
    first, second = casts.bytes_of(a), casts.bytes_of(b)
    initial = a.high_precision_init_val, b.high_precision_init_val
    a.data, b.data = b.data, a.data
    casts.assert_same_bytes(casts.bytes_of(a), second)
    casts.assert_same_bytes(casts.bytes_of(b), first)
    assert (b.high_precision_init_val is initial[0], a.high_precision_init_val is initial[1]) == (True, True)
    torch.utils.swap_tensors(a, b)
    casts.assert_same_bytes(casts.bytes_of(a), first)
    torch.Tensor.data.__set__(a, b)  # type: ignore[attr-defined]
    casts.assert_same_bytes(casts.bytes_of(a), second)
    x = torch.ones(2, SHAPE[1], dtype=a.dtype)
    assert torch.equal(nn.functional.linear(x, a), nn.functional.linear(x, b))


VALUES: dict[str, torch.Tensor] = {
    "plain tensor": torch.zeros(SHAPE, dtype=torch.bfloat16),
    "other format": casts.example("mxfp8"),
    "other options": casts.example("fp8_current:element=e5m2"),
    "other nominal dtype": casts.example("fp8_current", nominal=torch.float16),
    "other shape": casts.example("fp8_current", SHAPE[::-1]),
}


def load(weight: nn.Parameter, value: torch.Tensor) -> None:
    linear = nn.Linear(64, 32, bias=False)
    linear.weight = weight
    linear.load_state_dict({"weight": value})


@pytest.mark.parametrize("wrong", VALUES)
def test_data_of_another_kind_is_refused(wrong: str) -> None:
    weight, value = cast(0, "fp8_current"), VALUES[wrong]
    before = casts.bytes_of(weight)
    for call in (
        lambda: setattr(weight, "data", value),
        lambda: setattr(weight.t(), "data", value),
        lambda: weight.data.copy_(value),
        lambda: weight.detach().copy_(value),
        lambda: load(weight, value),
    ):
        with pytest.raises(RuntimeError, match=r"cannot (set the data of|copy)|size mismatch"):
            call()
    with pytest.raises(RuntimeError):
        torch.nn.utils.vector_to_parameters(torch.zeros(weight.numel()), [weight])
    casts.assert_same_bytes(casts.bytes_of(weight), before)
