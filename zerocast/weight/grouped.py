"""Grouped products: each group of rows of an input times its own matrix of a QuantizedWeight of
three dimensions.

Such a weight holds the experts of a layer, `[experts, M, K]`. torch's grouped product takes plain
tensors, so the weight of all experts is dequantized to the nominal dtype for the duration of one
product; autograd keeps the quantized weight. The forward pass reads the rowwise copy, the input
gradient reads the columnwise copy, as in other products.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zerocast import gemm


class _Grouped(torch.autograd.Function):
    """`x[group] @ W[group].T` for W `[groups, M, K]` as stored; `x` is `[rows, K]`, `offs` the
    end of each group, i32[groups].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, offs: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offs)
        ctx.recorded = weight.state.recorded()
        return multiply(x, weight, offs, columnwise=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, offs = ctx.saved_tensors
        # torch._grouped_mm has requirements on strides, and a gradient may come expanded.
        grad = grad.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            # A cast writes the buffers below autograd. The version counter of the weight, which
            # `saved_tensors` compares, does not move, so the weight's own version is compared.
            weight.state.validity.check_recorded(ctx.recorded)
            grad_x = multiply(grad, weight, offs, columnwise=True)
        if ctx.needs_input_grad[1]:
            grad_weight = gemm.plain.grouped_mm(grad.t(), x, offs)
        return grad_x, grad_weight, None


def multiply(x: Tensor, weight: Any, offs: Tensor, columnwise: bool) -> Tensor:
    """`x[group] @ W[group].T` from the rowwise copy, `x[group] @ W[group]` from the columnwise
    copy.
    """
    if weight.is_traced:
        traced: Tensor = torch.ops.zerocast.grouped_multiply(x, offs, columnwise, *weight.as_arguments())
        return traced
    # `read` gives [rows, columns] for either copy, so the orientation depends on the product alone.
    matrices = weight.read(columnwise, weight.dtype).view(weight.shape)
    return gemm.plain.grouped_mm(x, matrices if columnwise else matrices.transpose(-2, -1), offs)


def grouped_mm(
    input: Tensor,
    mat2: Any,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """torch.nn.functional.grouped_mm with `weight.transpose(-2, -1)` as the second operand.

    RuntimeError for a bias, for another dtype than the weight's nominal one, or for a weight whose
    gradients have another dtype.
    """
    weight = getattr(mat2, "transposed_of", None)
    if weight is None or weight.dim() != 3 or input.dim() != 2 or offs is None:
        raise RuntimeError(
            "a grouped product with a QuantizedWeight takes an input [rows, K], weight.transpose(-2, -1) of a weight "
            f"[groups, M, K], and offs; got {tuple(input.shape)}, {tuple(mat2.shape)}, offs {offs}"
        )
    if bias is not None or out_dtype not in (None, weight.dtype) or input.dtype != weight.dtype:
        raise RuntimeError(
            f"a grouped product with a QuantizedWeight of {weight.dtype} takes an input of that dtype and no bias, got "
            f"{input.dtype}, out_dtype {out_dtype}, bias {None if bias is None else tuple(bias.shape)}"
        )
    if weight.product_grad_dtype is not weight.dtype:
        raise RuntimeError(
            f"a grouped product has weight gradients of the nominal {weight.dtype}, and grad_dtype is {weight.product_grad_dtype}"
        )
    y: Tensor = _Grouped.apply(input, weight, offs)  # type: ignore[no-untyped-call]
    return y


def transpose(weight: Any, dim0: int, dim1: int) -> Any:
    """torch.transpose of the last two dimensions. Nothing moves: the result is a transposed reading
    of the same weight.
    """
    last_two = {weight.dim() - 1, weight.dim() - 2}
    if {dim0 % weight.dim(), dim1 % weight.dim()} != last_two:
        raise RuntimeError(f"a QuantizedWeight is transposed in its last two dimensions, got {dim0} and {dim1}")
    return weight.transposed()


# torch 2.9 has only `torch._grouped_mm`; later versions have the public function as well.
_NAMES = ((torch, "_grouped_mm"), (torch.nn.functional, "grouped_mm"))
PRODUCTS: dict[Any, Callable[..., Any]] = {
    torch.transpose: transpose,
    torch.Tensor.transpose: transpose,
    **{getattr(module, name): grouped_mm for module, name in _NAMES if hasattr(module, name)},
}
