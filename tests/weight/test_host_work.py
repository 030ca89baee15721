"""A product with a quantized weight calls little before and after the stage that decodes it."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

import zerocast
from tests import casts
from tests.fsdp2.test_host_work import calls_of_zerocast
from tests.observed import Dispatched
from zerocast.backends import checks, ops

# Calls of functions of zerocast in a forward and a backward pass of one layer. With every gain this bound comes down.
MAX_CALLS = 80


def trained_layer(fmt: str) -> tuple[nn.Linear, zerocast.ZeroAdamW]:
    """A quantized layer, and the optimizer that trains it."""
    model = nn.Sequential(nn.Linear(64, 64))
    zerocast.quantize_(model, zerocast.Recipe({"*.weight": fmt}))
    return model[0], zerocast.ZeroAdamW(model.named_parameters(), lr=1e-3)


@pytest.mark.parametrize("fmt", [fmt for fmt in casts.FORMATS if fmt != "identity"])
def test_a_layer_makes_few_calls(fmt: str) -> None:
    """Buffers are checked in the first products. Later ones call the backend without an op."""
    layer, _optimizer = trained_layer(fmt)
    x = torch.randn(16, 64, requires_grad=True).clone()

    def passes() -> None:
        y = layer(x)
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.grad(y, (x, layer.weight, layer.bias), y)

    passes()
    refused = mock.Mock(side_effect=AssertionError("a later product"))
    with mock.patch.object(ops, "dequantize", refused), mock.patch.object(checks, "check_plain", refused):
        by_file = calls_of_zerocast(passes)
    assert by_file.total() <= MAX_CALLS, by_file


def transformed(transform: Callable[..., Any]) -> Callable[[Any, Tensor], Tensor]:
    """Return a function that dequantizes a weight inside a transformation of a function of a tensor."""
    return lambda weight, x: transform(lambda x: x @ weight.dequantize().t())(x)


OBSERVERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "torch.jit": lambda weight, x: torch.jit.trace(lambda x: x @ weight.dequantize().t(), x, check_trace=False)(x),
    "functionalize": transformed(torch.func.functionalize),
    "jvp": transformed(lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[0]),
    "make_fx": transformed(lambda f: make_fx(f)(torch.ones(3, 64))),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize("name", OBSERVERS)
def test_tracers_and_transforms_find_an_op(name: str) -> None:
    """They would not see what a stage writes."""
    weight, x = casts.example("nvfp4", (64, 64), torch.float32), torch.randn(3, 64)
    expected = x @ weight.dequantize().t()
    assert torch.equal(OBSERVERS[name](weight, x), expected)


@pytest.mark.parametrize("observer", ["nothing", "a mode", "a profiler"])
def test_a_product_calls_an_op_only_where_it_is_observed(observer: str) -> None:
    weight, x = casts.example("fp8_block", (64, 64), torch.float32), torch.randn(3, 64)
    expected = nn.functional.linear(x, weight)
    observers = {
        "nothing": contextlib.nullcontext(),
        "a mode": Dispatched(),
        "a profiler": profile(activities=[ProfilerActivity.CPU]),
    }
    with mock.patch.object(ops, "dequantize", wraps=ops.dequantize) as op, observers[observer] as found:
        assert torch.equal(nn.functional.linear(x, weight), expected)
    assert op.called is (observer != "nothing")
    if observer == "a mode":
        assert found.stages == ["dequantize"]
    if observer == "a profiler":
        assert "zerocast::dequantize" in {event.key for event in found.key_averages()}


@pytest.mark.parametrize("fmt", ["fp8_current", "nvfp4"])
def test_a_product_reads_the_bytes_where_they_are(fmt: str) -> None:
    """What was converted for the product before is not used for other memory."""
    layer, _optimizer = trained_layer(fmt)
    weight: Any = layer.weight
    x, gradient = torch.randn(3, 64, requires_grad=True), torch.randn(3, 64)

    def passes() -> tuple[Tensor, ...]:
        y = layer(x)
        return y.detach(), *torch.autograd.grad(y, x, gradient)

    expected = passes()
    before = weight.rowwise_data
    weight.rebind(rowwise_data=before.clone())
    before.zero_()
    assert all(map(torch.equal, passes(), expected))
    weight.rowwise_data.set_(weight.rowwise_data.clone())
    assert all(map(torch.equal, passes(), expected))
    weight.rowwise_data.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="it was freed or made smaller"):
        passes()
