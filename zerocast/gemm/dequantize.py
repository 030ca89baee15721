"""Path dequantize: one stage turns the weight into a temporary of the input's dtype, an ordinary product follows.

Takes every format on every device. The temporary lives as long as the product does.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zerocast.formats import FormatSpec
from zerocast.gemm.case import Case


def takes(fmt: FormatSpec) -> bool:
    """Any."""
    return True


def obstacles(case: Case) -> Iterator[str]:
    """None."""
    yield from ()


def forward(x: Tensor, weight: Any, bias: Tensor | None, transposed: bool) -> Tensor:
    """Multiply with the rowwise copy."""
    w = weight.read(columnwise=False, dtype=x.dtype)
    return torch.nn.functional.linear(x, w.t() if transposed else w, bias)


def input_gradient(grad: Tensor, weight: Any, transposed: bool) -> Tensor:
    """Multiply with the columnwise copy."""
    w: Tensor = weight.read(columnwise=True, dtype=grad.dtype)
    return grad @ (w.t() if transposed else w)
