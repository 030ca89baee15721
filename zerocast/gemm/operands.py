"""What products make of their inputs, shared: one quantization of an input serves all that read it (q, k and v; gate and up).

The last one is kept, for the object it was made of, while autograd's own count of writes to it stands. It is dropped with the
object, by the next input and by the next backward pass, so that it adds nothing to what a step holds at its peak. Graphs, of
compilers and of CUDA, get their own: a compiler finds common subexpressions itself, and a replay must quantize anew.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerocast.formats import FormatSpec
from zerocast.gemm.choice import PATHS
from zerocast.gemm.inputs import is_traced


class _Shared(NamedTuple):
    x: "weakref.ref[Tensor]"
    version: int
    use: tuple[Any, ...]
    operands: tuple[Tensor, ...]


_last: _Shared | None = None


def of_input(path: str, x: Tensor, fmt: FormatSpec) -> tuple[Tensor, ...]:
    """`quantize` of a path for an input with elements."""
    global _last  # noqa: PLW0603
    if not _is_shareable(x):
        return PATHS[path].quantize(x, fmt, gradient=False)
    last, use = _last, (path, fmt, _stream(x))
    if last is not None and last.x() is x and last.version == x._version and last.use == use:
        return last.operands
    operands = PATHS[path].quantize(x, fmt, gradient=False)
    if operands[0] is not x:
        _last = _Shared(weakref.ref(x, _drop), x._version, use, operands)
    return operands


def forget() -> None:
    """Drop what is kept."""
    global _last  # noqa: PLW0603
    _last = None


def _drop(x: "weakref.ref[Tensor]") -> None:
    if _last is not None and _last.x is x:
        forget()


def _is_shareable(x: Tensor) -> bool:
    """Whether autograd recorded it, and with that relies on the same count of writes."""
    return x.grad_fn is not None and not is_traced(x) and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
