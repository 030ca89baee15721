"""Operands of products, shared: one quantization of an input serves all that read it (q, k and v;
gate and up).

The last one is kept, for the object it was made of, while autograd's own count of writes to it
stands. It is dropped with the object, by the next input and by the next backward pass, so that it
adds nothing to what a step holds at its peak. Graphs, of compilers and of CUDA, get their own: a
compiler finds common subexpressions itself, and a replay must quantize anew.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerocast.formats import FormatSpec
from zerocast.gemm.choice import GRADIENTS, PATHS, Operands
from zerocast.gemm.scaling import is_traced


class _Shared(NamedTuple):
    x: "weakref.ref[Tensor]"
    version: int
    use: tuple[Any, ...]
    operands: Operands
    of_gradient: Operands  # none for the input as it is, which would keep itself alive


_last: _Shared | None = None


def of_input(path: str, x: Tensor, fmt: FormatSpec, weight_gradients: str = "nominal") -> tuple[Operands, Operands]:
    """The operands of the product and of its weight gradient, made of an input with elements; the
    nominal weight gradient takes the input as it is.
    """
    global _last  # noqa: PLW0603
    if not _is_shareable(x):
        return _made(path, x, fmt, weight_gradients)
    last, use = _last, (path, fmt, weight_gradients, _stream(x))
    if last is not None and last.x() is x and last.version == x._version and last.use == use:
        return last.operands, last.of_gradient or (x,)
    operands, of_gradient = _made(path, x, fmt, weight_gradients)
    if operands[0] is not x:
        _last = _Shared(weakref.ref(x, _drop), x._version, use, operands, () if of_gradient[0] is x else of_gradient)
    return operands, of_gradient


def _made(path: str, x: Tensor, fmt: FormatSpec, weight_gradients: str) -> tuple[Operands, Operands]:
    if weight_gradients == "nominal":
        return PATHS[path].quantize(x, fmt, gradient=False), (x,)
    is_square = weight_gradients == "fp8"
    return GRADIENTS[path].quantize_both_ways(x, fmt, gradient=False, is_square=is_square)


def forget() -> None:
    """Drop all quantized operands that are kept."""
    global _last  # noqa: PLW0603
    _last = None


def _drop(x: "weakref.ref[Tensor]") -> None:
    if _last is not None and _last.x is x:
        forget()


def _is_shareable(x: Tensor) -> bool:
    """True if autograd recorded it, and with that relies on the same count of writes."""
    return x.grad_fn is not None and not is_traced(x) and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
