"""Products as torch.library ops, for graphs: what a compiler sees of a product with a QuantizedWeight.

`zerocast::product` takes the weight as it is. Below it, the graph has ops on its plain buffers that say nothing of how they
compute: the compiler can neither inline a dequantized weight nor keep one for the backward pass, which therefore holds
quantized bytes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast import gemm
from zerocast.backends import ops
from zerocast.formats import get_format
from zerocast.formats.layout import BUFFERS
from zerocast.weight import linear as compute
from zerocast.weight.weight import QuantizedWeight, define

_BUFFERS = "Tensor row_data, Tensor? row_scale, Tensor? column_data, Tensor? column_scale, Tensor? amax"
_WEIGHT = f"str format, int[] shape, ScalarType nominal, bool on_demand, {_BUFFERS}, str path, bool transposed"
_NAMES = BUFFERS[:5]


def _weight(described: Sequence[Any]) -> QuantizedWeight:
    fmt, shape, nominal, on_demand, *buffers = described
    held = {name: tensor for name, tensor in zip(_NAMES, buffers, strict=True) if tensor is not None}
    weight = QuantizedWeight.of_buffers(tuple(shape), get_format(fmt), nominal, held)
    weight.state.columnwise_on_demand = on_demand
    return weight


def _forward(x: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *described, path, transposed = rest
    return gemm.PATHS[path].forward(x, _weight(described), bias, transposed)


def _forward_fake(x: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    shape, transposed = rest[1], rest[-1]
    return x.new_empty((*x.shape[:-1], shape[1 if transposed else 0]))


def _input_gradient(grad: Tensor, *rest: Any) -> Tensor:
    *described, path, transposed = rest
    return gemm.PATHS[path].input_gradient(grad, _weight(described), transposed)


def _input_gradient_fake(grad: Tensor, *rest: Any) -> Tensor:
    shape, transposed = rest[1], rest[-1]
    return grad.new_empty((*grad.shape[:-1], shape[0 if transposed else 1]))


def described(weight: QuantizedWeight, x: Tensor, transposed: bool) -> tuple[Any, ...]:
    """The arguments by which the ops on buffers know a weight."""
    state = weight.state
    buffers = [state.buffers[name] for name in _NAMES]
    path = gemm.path_of(weight, x.dtype, transposed)
    return str(state.format), list(weight.shape), state.dtype, state.columnwise_on_demand, *buffers, path, transposed


def _product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, transposed: bool) -> Tensor:
    """What `zerocast::product` does with a weight."""
    y: Tensor = torch.ops.zerocast.product_of_buffers(x, bias, *described(weight, x, transposed))
    return y


def _gradient(grad: Tensor, weight: QuantizedWeight, transposed: bool) -> Tensor:
    """What `zerocast::product_gradient` does with a weight."""
    y: Tensor = torch.ops.zerocast.product_gradient_of_buffers(grad, *described(weight, grad, transposed))
    return y


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.transposed = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
    grad_x = torch.ops.zerocast.product_gradient(grad, weight, ctx.transposed) if needs_x else None
    grad_weight, grad_bias = compute.parameter_gradients(
        x, weight, grad, ctx.transposed, needs_weight, ctx.has_bias and needs_bias
    )
    return grad_x, grad_weight, grad_bias, None


ops.define("product_of_buffers", f"(Tensor x, Tensor? bias, {_WEIGHT}) -> Tensor", _forward, _forward_fake)
ops.define("product_gradient_of_buffers", f"(Tensor grad, {_WEIGHT}) -> Tensor", _input_gradient, _input_gradient_fake)
define(ops.define("product", "(Tensor x, Tensor weight, Tensor? bias, bool transposed) -> Tensor"), _product)
define(ops.define("product_gradient", "(Tensor grad, Tensor weight, bool transposed) -> Tensor"), _gradient)
torch.library.register_autograd("zerocast::product", _backward, setup_context=_save, lib=ops.LIBRARY)
