"""differentiable_once: the gradients of a product raise if they are differentiated again."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

SECOND = (
    "a product with a QuantizedWeight has no second derivatives (hvp, hessian, a penalty on gradients): leave its weight out of "
    "the recipe, or multiply by dequantize()"
)

# backward(ctx, saved tensors, gradient of the output): the gradient of each input, or None.
Backward = Callable[[Any, Sequence[Any], Tensor], tuple[Tensor | None, ...]]


class _Gradients(torch.autograd.Function):
    """Returns the first `number` tensors. A derivative of them by any of the tensors raises."""

    @staticmethod
    def forward(ctx: Any, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.detach() for gradient in tensors[:number])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(SECOND)


def differentiable_once(backward: Backward) -> Callable[[Any, Tensor], tuple[Tensor | None, ...]]:
    """Make a `backward` of an autograd Function, whose results depend on the saved tensors and on
    the gradient.

    torch's `once_differentiable` connects its error to neither of them. So `torch.autograd.grad`,
    which follows the graph to its inputs only, never meets the error, and takes the gradients of
    the product for constants.
    """

    @functools.wraps(backward)
    def once(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        # Nearly every backward pass comes here, and `no_grad` takes 3 µs.
        if not torch.is_grad_enabled():
            return backward(ctx, saved, gradient)
        with torch.no_grad():
            results = backward(ctx, saved, gradient)
        if torch.compiler.is_compiling():
            return results
        given = [result for result in results if result is not None]
        sources = [tensor for tensor in (gradient, *saved) if tensor is not None]
        connected: Any = iter(_Gradients.apply(len(given), *given, *sources))  # type: ignore[no-untyped-call]
        return tuple(None if result is None else next(connected) for result in results)

    return once
