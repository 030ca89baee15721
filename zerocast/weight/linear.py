"""Products with a QuantizedWeight: the forward product reads the rowwise copy, the input gradient
reads the columnwise copy. For `x @ W[i]` with an expert as stored the copies are swapped
(`experts.py`).

A path of `zerocast.gemm` computes both; a backward pass uses the path of its forward pass. The
weight gradient never needs the weight. It has the nominal dtype, or FP32 if the weight's
`grad_dtype` says so. For the backward pass autograd keeps the quantized weight and the input. The
input is kept quantized if the weight gradient is computed from its codes, otherwise unchanged.

torch.compile traces the same functions. It sees the quantization of an input as plain operations,
which it fuses with the operation that made the input. The product itself is a single operator: one
of torch if it multiplies the codes, otherwise one of `compiled_ops.py`. So a graph cannot keep a
dequantized or transposed weight.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast import gemm
from zerocast.weight import experts
from zerocast.weight.second_derivatives import differentiable_once


class _Product(torch.autograd.Function):
    """`x @ W.T + bias` for a weight as stored, `x @ W + bias` for a transposed one; `x` is
    `[..., features]`.

    `expert` is the number of the expert that is multiplied, None for a weight of two dimensions. `x
    @ W + bias` of an expert is `columnwise`: its forward pass is the input gradient of the other
    orientation, and vice versa.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Any,
        bias: Tensor | None,
        transposed: bool,
        path: str,
        weight_gradients: str,
        expert: int | None = None,
        columnwise: bool = False,
    ) -> Tensor:
        # An empty input has no amax and cannot be quantized. A frozen weight needs no second
        # operand for its gradient.
        has_elements = x.numel() > 0
        way = weight_gradients if ctx.needs_input_grad[1] and has_elements else "nominal"
        operands, saved_input = gemm.of_input(path, x, weight.format, way) if has_elements else ((), (x,))
        ctx.save_for_backward(*saved_input, weight)
        ctx.path = path
        ctx.transposed = transposed
        ctx.has_bias = bias is not None
        ctx.quantized = way != "nominal"
        ctx.recorded = weight.state.recorded()
        ctx.expert, ctx.columnwise = expert, columnwise
        matrix = weight if expert is None else weight.expert(expert)
        return _multiplied(path, operands, x, matrix, columnwise, transposed, bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: Sequence[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved_input, weight = saved
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_rows = _rows(grad)
        # The forward pass is over. Quantized operands that are still shared would only add to the
        # memory of the backward pass.
        gemm.forget()
        operands: tuple[Tensor, ...] = ()
        grad_x = grad_weight = None
        # The forward pass ran inside `QuantizedWeight.__torch_function__`, which disables
        # overrides. autograd calls the backward pass from outside of it. Without this line every
        # attribute of the weight would cost a trip through the override.
        with torch._C.DisableTorchFunctionSubclass():
            if ctx.quantized:
                # One read of the gradient makes the operands of both products.
                operands, quantized_grad = gemm.OPERATORS[ctx.path].quantize_both_ways(
                    grad, weight.format, gradient=True, is_square=False
                )
            elif needs_x and grad.numel():
                operands = gemm.PATHS[ctx.path].quantize(grad, weight.format, gradient=True)
            if needs_x:
                # A cast writes the buffers below autograd. The version counter of the weight, which
                # `saved_tensors` compares, does not move, so the weight's own version is compared.
                weight.state.check_recorded(ctx.recorded)
                matrix = weight if ctx.expert is None else weight.expert(ctx.expert)
                grad_x = _multiplied(ctx.path, operands, grad, matrix, not ctx.columnwise, ctx.transposed, None)
            if ctx.quantized:
                outer = functools.partial(gemm.OPERATORS[ctx.path].weight_gradient, quantized_grad, saved_input)
                grad_weight = _weight_gradient(weight, outer, ctx.expert)
            elif needs_weight:
                x_rows = _rows(saved_input[0])
                pair = (x_rows, grad_rows) if ctx.transposed or ctx.columnwise else (grad_rows, x_rows)
                grad_weight = _weight_gradient(weight, functools.partial(_outer, *pair), ctx.expert)
        grad_bias = grad_rows.sum(0) if ctx.has_bias and needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def multiply(path: str, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """Return `x @ W.T + bias` from the rowwise copy, not recorded by autograd."""
    operands, _ = gemm.of_input(path, x, weight.format) if x.numel() else ((), ())
    return _multiplied(path, operands, x, weight, False, False, bias)


def multiply_gradient(path: str, grad: Tensor, weight: Any) -> Tensor:
    """Return `grad @ W` from the columnwise copy, not recorded by autograd."""
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
    """Return the product of `operands`, made from `x`, with one copy of the weight, in the shape of
    `x`.

    `operands` is empty for an input without elements, which has no amax. The product is then empty.
    """
    leading = x.shape[:-1]
    if not operands:
        # The weight as stored is `[M, K]`: K features if exactly one of the two is True, else M.
        return x.new_empty((*leading, weight.matrix_shape[columnwise != transposed]))
    options = columnwise, transposed, bias, x.dtype
    if not weight.is_traced:
        y = gemm.PATHS[path].multiply(operands, weight, *options)
    elif path in gemm.OPERATORS and (direction := weight.direction_in_graph(columnwise, after=operands[0])):
        # A graph that calls torch's operator costs less CPU time than our op with a whole weight.
        y = gemm.OPERATORS[path].multiply_codes(operands, direction, weight.format, columnwise, bias, x.dtype)
    else:
        y = torch.ops.zerocast.multiply(operands, *options, path, *weight.as_arguments())
    # A path may have padded the rows of its operand to a multiple that the product takes.
    return y if y.shape[:-1] == leading else y[: x.numel() // x.shape[-1]].view(*leading, y.shape[-1])


def _weight_gradient(weight: Any, product: Callable[[torch.dtype], Tensor], expert: int | None) -> Tensor:
    """Return the weight gradient in the weight's logical shape and gradient dtype. That of one
    expert is zero for the others.

    `product` computes it in a given dtype. If a host such as Megatron fuses the accumulation of
    gradients, the result is added to `main_grad`, and autograd gets zeros.
    """
    dtype: torch.dtype = weight.product_grad_dtype
    main_grad: Tensor | None = weight.main_grad if hasattr(weight, "grad_added_to_main_grad") else None
    if main_grad is None:
        gradient = product(dtype)
        if expert is None:
            # A view of the same shape would take microseconds.
            return gradient if gradient.shape == weight.shape else gradient.view(weight.shape)
        of_all = gradient.new_zeros(weight.shape)
        of_all[expert] = gradient
        return of_all
    target = main_grad if expert is None else main_grad[expert]
    target.add_(product(main_grad.dtype).view(target.shape))
    # The host's gradient hook adds `grad` to `main_grad` unless this flag says that it is done.
    weight.grad_added_to_main_grad = True
    # The hook runs only if autograd gets a gradient. An expanded scalar takes no memory.
    return main_grad.new_zeros((), dtype=dtype).expand(weight.shape)


def _rows(x: Tensor) -> Tensor:
    """Return `x` as a matrix of rows of features."""
    # A view of the same shape would take microseconds.
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _outer(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `left.T @ right` of operands that were not quantized."""
    if dtype is torch.float32:
        # torch.mm has no output dtype. Casting its bf16 result would lose the FP32 sum.
        return torch.mm(left.float().t(), right.float())
    return gemm.plain.matmul(left.t(), right).to(dtype)


def _product(x: Any, weight: Any, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return `x @ W.T + bias`, or `x @ W + bias` when `transposed`, for W `[M, K]` as it is
    stored.
    """
    if not hasattr(weight, "format") or hasattr(x, "format") or hasattr(bias, "format"):
        raise RuntimeError("a QuantizedWeight is the weight of a product, and the other operands are plain tensors")
    if weight.dim() != 2:
        raise RuntimeError(
            f"products expect a weight of two dimensions, got shape {tuple(weight.shape)}: experts in one weight take part in bmm, "
            "grouped_mm and, one at a time as weight[i], in linear and matmul"
        )
    if weight.transposed_of is not None:
        weight, transposed = weight.transposed_of, not transposed
    return experts.in_product_dtype(lambda x: _recorded(x, weight, bias, transposed), x, weight)


def _recorded(x: Tensor, weight: Any, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return the product, for autograd or for torch.func."""
    if bias is not None and bias.dtype is not x.dtype:
        bias = bias.to(x.dtype)
    if torch._C._are_functorch_transforms_active():
        if weight.expert_of is not None:
            raise RuntimeError("torch.func has no products of single experts: use bmm, or call dequantize()")
        # torch.func does not take an autograd.Function without `setup_context`. Operators pass.
        product = torch.matmul(x, weight if transposed else torch.t(weight))
        return product if bias is None else product + bias
    if weight.expert_of is not None:
        return _of_expert(x, weight, bias, columnwise=transposed)
    path = gemm.path_of(weight, x.dtype, transposed)
    way = gemm.weight_gradients_of(weight, path)
    y: Tensor = _Product.apply(x, weight, bias, transposed, path, way)  # type: ignore[no-untyped-call]
    return y


def _of_expert(x: Tensor, expert: Any, bias: Tensor | None, columnwise: bool) -> Tensor:
    """Return the product with one expert, recorded by autograd as one with the weight of all
    experts.
    """
    weight, index = expert.expert_of
    path = gemm.path_of(expert, x.dtype, transposed=False)
    # The operands of a quantized weight gradient belong to the other orientation.
    way = "nominal" if columnwise else gemm.weight_gradients_of(weight, path)
    y: Tensor = _Product.apply(x, weight, bias, False, path, way, index, columnwise)  # type: ignore[no-untyped-call]
    return y


def product_below_autograd(x: Tensor, operand: Any, bias: Tensor | None = None) -> Tensor:
    """Return `x @ operand + bias` as an operator below autograd, such as DTensor calls.

    autograd has recorded the operator by then, and its backward formula calls this function again.
    So a transposed weight as `operand` means a forward product, and a weight as stored means an
    input gradient.
    """
    weight = operand if operand.transposed_of is None else operand.transposed_of
    if hasattr(x, "format") or x.dtype != weight.dtype:
        raise RuntimeError(f"a product with {weight!r} expects a plain tensor of its dtype, got {x.dtype}")
    path = gemm.path_of(weight, x.dtype, transposed=False)
    if operand is not weight:
        # Without gradients, `use(weight_gradients=...)` has nothing to warn of.
        if torch.is_grad_enabled():
            gemm.warn_nominal(weight, path)
        return multiply(path, x, weight, bias)
    y = multiply_gradient(path, x, weight)
    return y if bias is None else y + bias


def linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear with a quantized weight."""
    return _product(input, weight, bias, transposed=False)


def matmul(input: Any, other: Any) -> Tensor:
    """torch.matmul with the weight as either operand, or with the experts of a weight (`bmm`)."""
    if hasattr(input, "format") and not hasattr(other, "format"):
        # W @ x is the transpose of x.T @ W.T, which is a linear product.
        return (
            _product(other, input, None, transposed=False)
            if other.dim() == 1
            else matmul(other.mT, input.transposed()).mT
        )
    if hasattr(other, "format") and other.dim() == 3 and input.dim() == 3:
        return experts.bmm(input, other)
    return _product(input, other, None, transposed=True)


def mm(input: Any, mat2: Any) -> Tensor:
    """torch.mm with the weight as either operand."""
    for operand in (input, mat2):
        if operand.dim() != 2:
            raise RuntimeError(f"mm() expects matrices, got an operand of shape {tuple(operand.shape)}")
    return matmul(input, mat2)


def addmm(input: Tensor, mat1: Tensor, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """torch.addmm with the weight as the last operand and without scaling."""
    if (beta, alpha) != (1, 1):
        raise RuntimeError(f"addmm with a QuantizedWeight expects beta=1 and alpha=1, got {beta} and {alpha}")
    if input.dim() == 1 and mat1.dim() == 2:
        return _product(mat1, mat2, input, transposed=True)
    product = mm(mat1, mat2)
    return product + input.to(product.dtype)


def t(weight: Any) -> Any:
    """torch.t: a transposed reading of the same weight, as an operand of the other products."""
    if weight.dim() != 2:
        raise RuntimeError(f"t() expects a weight of two dimensions, got shape {tuple(weight.shape)}")
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
    **experts.PRODUCTS,
}
