"""Products with a QuantizedWeight: forward from the rowwise copy, input gradient from the
columnwise copy.

The weight gradient has the nominal dtype, or FP32 when the weight's `grad_dtype` says so; it never
needs the weight. The other two are computed by a path of `zerocast.gemm`, the same one for a
forward pass and its backward pass. What autograd keeps for the backward pass is the quantized
weight and the input as it came, or quantized where the weight gradient is computed from that.

A compiler traces the same functions. It sees how an input is quantized, as plain operations that it
fuses with what made the input. The product itself is one operator, of torch where that computes
with the codes, else of ours (`compiled_ops.py`): nothing that is dequantized for it, or transposed,
can be kept.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zerocast import gemm
from zerocast.weight import grouped


class _Product(torch.autograd.Function):
    """`x @ W.T + bias` for a weight as stored, `x @ W + bias` for a transposed one; `x` is
    `[..., features]`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Tensor | None, transposed: bool, path: str, weight_gradients: str
    ) -> Tensor:
        way = weight_gradients if ctx.needs_input_grad[1] and x.numel() else "nominal"
        operands, kept = gemm.of_input(path, x, weight.format, way) if x.numel() else ((), (x,))
        ctx.quantized, ctx.recorded = way != "nominal", weight.state.recorded()
        ctx.save_for_backward(*kept, weight)
        ctx.has_bias, ctx.transposed, ctx.path = bias is not None, transposed, path
        return _multiplied(path, operands, x, weight, False, transposed, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *kept, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        gemm.forget()
        operands: tuple[Tensor, ...] = ()
        grad_x = grad_weight = None
        with torch._C.DisableTorchFunctionSubclass():  # as within the weight's own functions
            if ctx.quantized:
                operands, left = gemm.GRADIENTS[ctx.path].quantize_both_ways(
                    grad, weight.format, gradient=True, is_square=False
                )
            elif needs_x and grad.numel():
                operands = gemm.PATHS[ctx.path].quantize(grad, weight.format, gradient=True)
            if needs_x:
                weight.state.validity.check_recorded(ctx.recorded)
                grad_x = _multiplied(ctx.path, operands, grad, weight, True, ctx.transposed, None)
            if ctx.quantized:
                grad_weight = _weight_gradient(weight, functools.partial(_outer_quantized, ctx.path, left, kept))
            elif needs_weight:
                x_rows = kept[0].reshape(-1, kept[0].shape[-1])
                pair = (x_rows, rows) if ctx.transposed else (rows, x_rows)
                grad_weight = _weight_gradient(weight, functools.partial(_outer, *pair))
        return grad_x, grad_weight, rows.sum(0) if ctx.has_bias and needs_bias else None, None, None, None


def multiply(path: str, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """`x @ W.T + bias` from the rowwise copy; no autograd."""
    operands, _ = gemm.of_input(path, x, weight.format) if x.numel() else ((), ())
    return _multiplied(path, operands, x, weight, False, False, bias)


def multiply_gradient(path: str, grad: Tensor, weight: Any) -> Tensor:
    """`grad @ W` from the columnwise copy; no autograd."""
    operands = gemm.PATHS[path].quantize(grad, weight.format, gradient=True) if grad.numel() else ()
    return _multiplied(path, operands, grad, weight, True, False, None)


def _multiplied(
    path: str,
    operands: Sequence[Tensor],
    x: Tensor,
    weight: Any,
    columnwise: bool,
    transposed: bool,
    bias: Tensor | None,
) -> Tensor:
    """The product for the operands made of `x`; of an input without elements there are none,
    since it has no amax.
    """
    shape = *x.shape[:-1], weight.matrix_shape[columnwise != transposed]
    if not operands:
        return x.new_empty(shape)
    rest = columnwise, transposed, bias, x.dtype
    if not weight.is_traced:
        y = gemm.PATHS[path].multiply(operands, weight, *rest)
    elif path in gemm.OPERATORS and (direction := weight.direction_in_graph(columnwise, after=operands[0])):
        y = gemm.OPERATORS[path].multiply_codes(operands, direction, weight.format, columnwise, bias, x.dtype)
    else:
        y = torch.ops.zerocast.multiply(operands, *rest, path, *weight.as_arguments())
    # without the rows of a padding
    return y if y.shape == shape else y[: x.numel() // x.shape[-1]].view(shape)


def _weight_gradient(weight: Any, product: Callable[[torch.dtype], Tensor]) -> Tensor:
    """`product` in the gradient dtype of the weight, of its logical shape; added to `main_grad`
    where a host fuses that.
    """
    dtype: torch.dtype = weight.product_grad_dtype
    fused: Tensor | None = weight.main_grad if hasattr(weight, "grad_added_to_main_grad") else None
    if fused is None:
        return product(dtype).view(weight.shape)
    fused.add_(product(fused.dtype).view(fused.shape))
    weight.grad_added_to_main_grad = True
    return fused.new_zeros((), dtype=dtype).expand(weight.shape)


def _outer(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """`left.T @ right` of operands as they came."""
    if dtype is torch.float32:
        return left.float().t() @ right.float()
    return gemm.plain.matmul(left.t(), right).to(dtype)


def _outer_quantized(path: str, grad: Sequence[Tensor], x: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if gemm.is_traced(grad[0]) and path not in gemm.OPERATORS:
        return torch.ops.zerocast.weight_gradient(grad, x, dtype, path)  # type: ignore[no-any-return]
    return gemm.GRADIENTS[path].weight_gradient(grad, x, dtype)


def _product(x: Any, weight: Any, bias: Tensor | None, transposed: bool) -> Tensor:
    """`x @ W.T + bias`, or `x @ W + bias` when `transposed`, for W `[M, K]` as it is stored."""
    if not hasattr(weight, "format") or hasattr(x, "format") or hasattr(bias, "format"):
        raise RuntimeError(
            "a QuantizedWeight is the weight of a product: its second operand, with plain tensors beside it"
        )
    if weight.dim() != 2:
        raise RuntimeError(f"products take a weight of two dimensions, got shape {tuple(weight.shape)}")
    if weight.transposed_of is not None:
        weight, transposed = weight.transposed_of, not transposed
    autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else weight.dtype
    if x.dtype != dtype and not autocast:
        raise RuntimeError(f"the input is {x.dtype} and the weight's nominal dtype {dtype}: they must be the same")
    bias = None if bias is None else bias.to(dtype)
    if autocast:
        with torch.autocast(x.device.type, enabled=False):
            return _recorded(x.to(dtype), weight, bias, transposed)
    return _recorded(x, weight, bias, transposed)


def _recorded(x: Tensor, weight: Any, bias: Tensor | None, transposed: bool) -> Tensor:
    """The product, for autograd or for torch.func."""
    if torch._C._are_functorch_transforms_active():  # torch.func takes operators alone
        product = torch.matmul(x, weight if transposed else torch.t(weight))
        return product if bias is None else product + bias
    path = gemm.path_of(weight, x.dtype, transposed)
    way = gemm.weight_gradients_of(path)
    y: Tensor = _Product.apply(x, weight, bias, transposed, path, way)  # type: ignore[no-untyped-call]
    return y


def product_below_autograd(x: Tensor, operand: Any, bias: Tensor | None = None) -> Tensor:
    """`x @ operand + bias` where autograd has been before, as within a DTensor; its backward is
    such a product too.

    The operand of a forward product is the weight transposed, that of an input gradient the weight
    as stored.
    """
    weight = operand if operand.transposed_of is None else operand.transposed_of
    if hasattr(x, "format") or x.dtype != weight.dtype:
        raise RuntimeError(f"a product with {weight!r} takes a plain tensor of its dtype, got {x.dtype}")
    path = gemm.path_of(weight, x.dtype, transposed=False)
    if operand is not weight:
        if torch.is_grad_enabled():
            gemm.warn_nominal(weight, path)
        return multiply(path, x, weight, bias)
    y = multiply_gradient(path, x, weight)
    return y if bias is None else y + bias


def linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear with a quantized weight."""
    return _product(input, weight, bias, transposed=False)


def matmul(input: Tensor, other: Any) -> Tensor:
    """torch.matmul with the weight as the second operand."""
    return _product(input, other, None, transposed=True)


def mm(input: Tensor, mat2: Any) -> Tensor:
    """torch.mm with the weight as the second operand."""
    if input.dim() != 2:
        raise RuntimeError(f"mm() takes matrices, got an input of shape {tuple(input.shape)}")
    return matmul(input, mat2)


def addmm(input: Tensor, mat1: Tensor, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """torch.addmm with the weight as the last operand and without scaling."""
    if (beta, alpha) != (1, 1):
        raise RuntimeError(f"addmm with a QuantizedWeight takes beta=1 and alpha=1, got {beta} and {alpha}")
    if input.dim() == 1 and mat1.dim() == 2:
        return _product(mat1, mat2, input, transposed=True)
    product = mm(mat1, mat2)
    return product + input.to(product.dtype)


def t(weight: Any) -> Any:
    """torch.t: the same weight for the other products to read the other way."""
    if weight.dim() != 2:
        raise RuntimeError(f"t() takes a weight of two dimensions, got shape {tuple(weight.shape)}")
    return weight.transposed()


PRODUCTS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: linear,
    torch.t: t,
    torch.Tensor.t: t,
    torch.Tensor.T.__get__: t,  # type: ignore[attr-defined]
    torch.mm: mm,
    torch.Tensor.mm: mm,
    torch.matmul: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul,
    torch.addmm: addmm,
    torch.Tensor.addmm: addmm,
    **grouped.PRODUCTS,
}
