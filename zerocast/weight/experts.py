"""Products with a weight of three dimensions, which holds the experts of a layer.

    stored as    product                                  forward reads   input gradient reads
    [E, M, K]    x @ W.T: `grouped_mm` and `bmm` with     rowwise         columnwise
                 `W.transpose(-2, -1)`, `linear(x, W[i])`
    [E, K, M]    x @ W: `grouped_mm` and `bmm` with `W`,  columnwise      rowwise
                 `x @ W[i]`

So a product reads the copy whose blocks are along the dimension that is summed over, whichever way
a model stores its experts.

Where a path of `zerocast.gemm` can multiply all experts together, it does. Otherwise the weight of
all experts is dequantized to the dtype of the input for the duration of one product. autograd keeps
the input as it is and the quantized weight. `W[i]` is one expert as an operand of the products of
matrices (`linear.py`), which run on tensor cores like the products of other matrices. Its gradient
has the shape of the full weight, and is zero for the other experts.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerocast import gemm
from zerocast.weight.second_derivatives import differentiable_once


class ExpertOf(NamedTuple):
    """The index of one expert in a weight of three dimensions."""

    weight: Any
    number: int


class _Product(torch.autograd.Function):
    """The products of all experts: `x @ W.T` for W `[E, M, K]` as stored, or `x @ W` for W `[E, K,
    M]` if `columnwise`.

    `x` is `[rows, K]` with `offs`, the end of each expert's rows, i32[E]; or `[E, rows, K]` with
    None.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, offs: Tensor | None, columnwise: bool, path: str, weight_gradients: str
    ) -> Tensor:
        ctx.save_for_backward(x, weight, offs)
        ctx.columnwise = columnwise
        ctx.path = path
        ctx.quantized = weight_gradients != "nominal" and x.numel() > 0
        ctx.recorded = weight.state.recorded()
        operands, _ = gemm.of_input(path, x, weight.format)
        return _multiplied(path, operands, x, weight, offs, columnwise, is_gradient=False)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: Sequence[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, offs = saved
        # torch._grouped_mm has requirements on strides, and a gradient may come expanded.
        grad = grad.contiguous()
        # The forward pass is over, and the last quantized input would only add to the memory.
        gemm.forget()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            # A cast writes the buffers below autograd. The version counter of the weight, which
            # `saved_tensors` compares, does not move, so the weight's own version is compared.
            weight.state.check_recorded(ctx.recorded)
            operands = gemm.module_of(ctx.path).quantize(grad, weight.format, gradient=True)
            grad_x = _multiplied(ctx.path, operands, grad, weight, offs, not ctx.columnwise, is_gradient=True)
        if ctx.needs_input_grad[1]:
            left, right = (x, grad) if ctx.columnwise else (grad, x)
            if ctx.quantized:
                grad_weight = _quantized_weight_gradient(ctx.path, left, right, offs)
            else:
                grad_weight = _weight_gradient(left, right, offs, weight.product_grad_dtype)
        return grad_x, grad_weight, None, None, None, None


def _quantized_weight_gradient(path: str, left: Tensor, right: Tensor, offs: Tensor | None) -> Tensor:
    if gemm.is_traced(left):
        traced: Tensor = torch.ops.zerocast.experts_weight_gradient(left, right, offs, path)
        return traced
    return gemm.EXPERTS[path].weight_gradient(left, right, offs)


def _weight_gradient(left: Tensor, right: Tensor, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `left.T @ right` of each expert, `[E, left features, right features]`."""
    if offs is not None:
        return gemm.plain.grouped_mm(left.t(), right, offs).to(dtype)
    if dtype is torch.float32:
        # torch.bmm has no output dtype. Casting its bf16 result would lose the FP32 sum.
        return left.float().mT @ right.float()
    return gemm.plain.matmul(left.mT, right).to(dtype)


def _multiplied(
    path: str,
    operands: Sequence[Tensor],
    x: Tensor,
    weight: Any,
    offs: Tensor | None,
    columnwise: bool,
    is_gradient: bool,
) -> Tensor:
    """Return the product of `operands`, made from `x`, with one copy of the weight."""
    # torch's scaled product does not take matrices without elements.
    if not x.numel() and path in gemm.EXPERTS:
        return x.new_empty((*x.shape[:-1], weight.shape[2 if columnwise else 1]))
    if weight.is_traced:
        traced: Tensor = torch.ops.zerocast.multiply_experts(
            operands, offs, columnwise, is_gradient, x.dtype, path, *weight.as_arguments()
        )
        return traced
    return multiply(path, operands, weight, offs, columnwise, is_gradient)


def multiply(
    path: str, operands: Sequence[Tensor], weight: Any, offs: Tensor | None, columnwise: bool, is_gradient: bool
) -> Tensor:
    """Return `x @ W.T` of each expert from the rowwise copy, `x @ W` from the columnwise copy, for
    the operands that the path made of `x`.
    """
    if path in gemm.EXPERTS:
        return gemm.EXPERTS[path].multiply(operands, weight, offs, columnwise, is_gradient)
    (x,) = operands
    # `read` gives [rows, columns] for either copy, so the orientation depends on the product only.
    matrices = weight.read(columnwise, x.dtype).view(weight.shape)
    operand = matrices if columnwise else matrices.transpose(-2, -1)
    return gemm.plain.matmul(x, operand) if offs is None else gemm.plain.grouped_mm(x, operand, offs)


def _recorded(x: Tensor, weight: Any, offs: Tensor | None, columnwise: bool) -> Tensor:
    """Return the product by the path that was chosen for the weight, recorded by autograd."""
    path = gemm.path_of(weight, x.dtype, transposed=False)
    # The GEMM paths of experts make weight gradients in bf16 only.
    is_bf16 = weight.product_grad_dtype is torch.bfloat16
    way = gemm.weight_gradients_of(weight, path) if is_bf16 else "nominal"
    y: Tensor = _Product.apply(x, weight, offs, columnwise, path, way)  # type: ignore[no-untyped-call]
    return y


def _as_stored(operand: Any) -> tuple[Any, bool]:
    """Return (weight as stored, True if `operand` is that weight and no transposed reading of
    it).
    """
    weight = getattr(operand, "transposed_of", None)
    return (operand, True) if weight is None else (weight, False)


def grouped_mm(
    input: Tensor,
    mat2: Any,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """torch.nn.functional.grouped_mm with a weight `[E, K, M]`, or with `weight.transpose(-2, -1)`
    of one `[E, M, K]`, as the second operand.

    Raises RuntimeError for a bias, for a dtype other than the weight's nominal one, or for a weight
    whose gradients have a different dtype.
    """
    is_grouped = mat2.dim() == 3 and input.dim() == 2 and offs is not None
    if not hasattr(mat2, "format") or not is_grouped or input.shape[1] != mat2.shape[1]:
        raise RuntimeError(
            "a grouped product with a QuantizedWeight expects an input [rows, K], a weight [groups, K, M], which may be "
            f"weight.transpose(-2, -1), and offs; got {tuple(input.shape)}, {tuple(mat2.shape)}, offs {offs}"
        )
    weight, columnwise = _as_stored(mat2)
    if bias is not None or out_dtype not in (None, weight.dtype) or input.dtype != weight.dtype:
        raise RuntimeError(
            f"a grouped product with a QuantizedWeight of {weight.dtype} expects an input of that dtype and no bias, got "
            f"{input.dtype}, out_dtype {out_dtype}, bias {None if bias is None else tuple(bias.shape)}"
        )
    if weight.product_grad_dtype is not weight.dtype:
        raise RuntimeError(
            f"a grouped product has weight gradients of the nominal {weight.dtype}, and grad_dtype is {weight.product_grad_dtype}"
        )
    return _recorded(input, weight, offs, columnwise)


def bmm(input: Any, mat2: Any) -> Tensor:
    """Run torch.bmm with the experts of a weight as either operand; with the weight second, the
    input is `[E, rows, K]`.

    Raises RuntimeError for other shapes, and for a dtype other than the weight's nominal one
    outside of autocast.
    """
    if hasattr(input, "format") and not hasattr(mat2, "format"):
        return bmm(mat2.mT, input.transposed()).mT
    if not hasattr(mat2, "format") or hasattr(input, "format"):
        raise RuntimeError("a product of experts expects one QuantizedWeight and a plain tensor")
    weight, columnwise = _as_stored(mat2)
    if mat2.dim() != 3 or input.dim() != 3 or (input.shape[0], input.shape[2]) != tuple(mat2.shape[:2]):
        raise RuntimeError(
            "a product of experts expects an input [E, rows, K] and a weight [E, K, M], which may be weight.transpose(-2, -1); got "
            f"{tuple(input.shape)} and {tuple(mat2.shape)}"
        )
    return in_product_dtype(lambda x: _recorded(x, weight, None, columnwise), input, weight)


def in_product_dtype(product: Callable[[Tensor], Tensor], x: Tensor, weight: Any) -> Tensor:
    """Return `product` of the input in the dtype of autocast, which is disabled during the call.

    Without autocast, raises RuntimeError for an input whose dtype is not the weight's nominal one.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        converted = x.to(torch.get_autocast_dtype(device))
        # The operands have the dtype of autocast already. Left on, autocast would also cast the
        # operands of the products inside a path, which may be FP32 on purpose (`gemm.plain`).
        with torch.autocast(device, enabled=False):
            return product(converted)
    if x.dtype != weight.dtype:
        raise RuntimeError(
            f"the input is {x.dtype} and the weight's nominal dtype {weight.dtype}: they must be the same"
        )
    return product(x)


def select(input: Any, dim: int, index: int) -> Any:
    """torch.select of one expert, as an operand of products. Nothing moves. Gradients go to the
    weight of all experts.
    """
    if input.dim() != 3 or dim % 3 != 0:
        # The operator itself raises, with advice.
        return torch.ops.aten.select.int(input, dim, index)
    count = input.shape[0]
    if not -count <= index < count:
        raise IndexError(f"index {index} is out of range for a weight of {count} experts")
    weight, is_as_stored = _as_stored(input)
    expert = weight.expert(index % count)
    return expert if is_as_stored else expert.transposed()


def index(weight: Any, where: Any) -> Any:
    """Return `weight[where]` for the number of an expert, also in a tensor of no dimensions. Other
    indices raise.
    """
    is_number = isinstance(where, int) and not isinstance(where, bool)
    if isinstance(where, Tensor) and where.dim() == 0 and where.dtype not in (torch.bool, torch.uint8):
        where, is_number = int(where), True
    return select(weight, 0, where) if is_number else torch.Tensor.__getitem__(weight, where)


def unbind(input: Any, dim: int = 0) -> tuple[Any, ...]:
    """torch.unbind of a weight into its experts, one per index of `dim`."""
    return tuple(select(input, dim, number) for number in range(input.shape[dim]))


def transpose(weight: Any, dim0: int, dim1: int) -> Any:
    """torch.transpose of the last two dimensions. Nothing moves: the result is a transposed reading
    of the same weight.
    """
    last_two = {weight.dim() - 1, weight.dim() - 2}
    if {dim0 % weight.dim(), dim1 % weight.dim()} != last_two:
        raise RuntimeError(f"a QuantizedWeight is transposed in its last two dimensions, got {dim0} and {dim1}")
    return weight.transposed()


PRODUCTS: dict[Any, Callable[..., Any]] = {
    torch.transpose: transpose,
    torch.Tensor.transpose: transpose,
    torch.Tensor.mT.__get__: lambda weight: weight.transposed(),  # type: ignore[attr-defined]
    # The compiler of torch 2.15 replaces `Tensor.mT` by this operator.
    torch.ops.aten.mT: lambda weight: weight.transposed(),
    torch.bmm: bmm,
    torch.Tensor.bmm: bmm,
    torch.select: select,
    torch.Tensor.select: select,
    torch.Tensor.__getitem__: index,
    torch.unbind: unbind,
    torch.Tensor.unbind: unbind,
    torch.Tensor.__iter__: lambda weight: iter(unbind(weight)),
    torch._grouped_mm: grouped_mm,
    torch.nn.functional.grouped_mm: grouped_mm,
}
