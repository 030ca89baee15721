"""Quantized inputs, shared between products: one quantization of an input serves all products that
read it (q, k and v; gate and up).

Only the last quantized input is kept, and only while the input's version counter has not moved. It
is dropped with the input, by the next input, and by the next backward pass, so it adds nothing to
the peak memory of a step. Graphs do not share: a compiler finds common subexpressions itself, and
the replay of a CUDA graph must quantize the input of that replay.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerocast.formats import FormatSpec
from zerocast.gemm.choice import OPERATORS, Operands, module_of
from zerocast.gemm.scaling import is_traced


class _Shared(NamedTuple):
    """A quantized input.

    Attributes:
        x: the input.
        version: the version counter of the input when it was quantized.
        use: the path, the format, the setting of weight gradients, and the CUDA stream.
        operands: the operands of the product.
        of_gradient: the operands of the weight gradient. Empty if that takes the input itself,
            which would otherwise be kept alive by this record.
    """

    x: "weakref.ref[Tensor]"
    version: int
    use: tuple[Any, ...]
    operands: Operands
    of_gradient: Operands


_last: _Shared | None = None


def of_input(path: str, x: Tensor, fmt: FormatSpec, weight_gradients: str = "nominal") -> tuple[Operands, Operands]:
    """Return (operands of the product, operands of its weight gradient) for an input that is not
    empty. A nominal weight gradient takes the input itself.
    """
    global _last  # noqa: PLW0603
    # This path takes the input itself, so there is nothing to share.
    if path == "dequantize":
        return (x,), (x,)
    if not _is_shareable(x):
        return _made(path, x, fmt, weight_gradients)
    # Read the global once, since another thread may replace it. The stream is a part of the use:
    # operands that one stream is still writing must not be read on another.
    last = _last
    use = path, fmt, weight_gradients, _stream(x)
    if last is not None and last.x() is x and last.version == x._version and last.use == use:
        return last.operands, last.of_gradient or (x,)
    operands, of_gradient = _made(path, x, fmt, weight_gradients)
    _last = _Shared(weakref.ref(x, _drop), x._version, use, operands, () if of_gradient[0] is x else of_gradient)
    return operands, of_gradient


def _made(path: str, x: Tensor, fmt: FormatSpec, weight_gradients: str) -> tuple[Operands, Operands]:
    if weight_gradients == "nominal":
        return module_of(path).quantize(x, fmt, gradient=False), (x,)
    is_square = weight_gradients == "fp8"
    return OPERATORS[path].quantize_both_ways(x, fmt, gradient=False, is_square=is_square)


def forget() -> None:
    """Drop the quantized input that is kept."""
    global _last  # noqa: PLW0603
    _last = None


def _drop(x: "weakref.ref[Tensor]") -> None:
    """Called when an input is freed. By then its entry may belong to a different input."""
    if _last is not None and _last.x is x:
        forget()


def _is_shareable(x: Tensor) -> bool:
    """Return True if the operands of an input may be shared."""
    # autograd relies on the version counter of tensors that it recorded. For other tensors it is
    # not guaranteed that every write advances the counter.
    return x.grad_fn is not None and not is_traced(x) and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
