"""Path dequantize: dequantize the weight into a temporary of the input's dtype, then multiply plain
tensors (`plain.py`).

This path takes every format on every device. The temporary lives as long as the product runs.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.formats import FormatSpec
from zerocast.gemm import plain
from zerocast.gemm.case import Case


def supports(fmt: FormatSpec) -> bool:
    """Return True: every format can be dequantized."""
    return True


def hardware(case: Case) -> Iterator[str]:
    """Yield nothing: every device can multiply dequantized weights."""
    yield from ()


def unsupported_reasons(case: Case) -> Iterator[str]:
    """Yield nothing: this path is always available."""
    yield from ()


def quantize(x: Tensor, fmt: FormatSpec, gradient: bool) -> tuple[Tensor, ...]:
    """Return the input unchanged, with its leading dimensions."""
    return (x,)


def multiply(
    operands: Sequence[Tensor], weight: Any, columnwise: bool, transposed: bool, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `x @ W.T + bias`, or `x @ W` if exactly one of `columnwise` and `transposed` is
    True.
    """
    (x,) = operands
    w: Tensor = weight.read(columnwise, dtype)
    if columnwise:
        return plain.matmul(x, w.t() if transposed else w)
    return plain.linear(x, w.t() if transposed else w, bias)
