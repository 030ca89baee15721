"""Products of plain tensors, for weights that were never quantized and for the path dequantize.

That path takes every format on every device. It dequantizes the weight into a temporary of the
input's dtype, which lives as long as the product runs.

On a CPU without bf16 instructions torch's bf16 products reach a tenth of the speed of its FP32
products. There the operands are widened, which is exact, and the FP32 product is rounded once.
Everywhere else this is torch's own product of the operands.
"""

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerocast.formats import FormatSpec
from zerocast.gemm.case import Case
from zerocast.gemm.scaling import is_traced

logger = logging.getLogger(__name__)


def _has_bf16_products() -> bool:
    """Return True if torch has fast bf16 products for this CPU; a torch that cannot say has
    none.
    """
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        # oneDNN says so of every x86 CPU with AVX-512, also where it emulates the instructions. Its
        # products then take 3 to 4 times as long as FP32 ones (1024x256 by 256x1024, one thread).
        is_x86 = torch.cpu._is_avx2_supported()
        return not is_x86 or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    except (AttributeError, RuntimeError):
        return False


# Evaluated once, at import. Compilers trace the functions below, and a constant does not break a
# graph.
HAS_BF16_PRODUCTS = _has_bf16_products()


def product_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """Return the dtype in which products of operands of `dtype` are computed: their own, or
    FP32.
    """
    is_slow = dtype is torch.bfloat16 and device == "cpu" and not HAS_BF16_PRODUCTS
    return torch.float32 if is_slow else dtype


@functools.cache
def log_fp32_products() -> None:
    """Log once, on rank 0, that products of bf16 weights are computed in FP32."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
        logger.info("this CPU has no bf16 instructions: products of bf16 weights are computed in FP32 and rounded")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias` in the dtype of `x`."""
    # A QuantizedWeight and a DTensor have separate products, by torch's override of `linear`.
    dtype = product_dtype(x.dtype, x.device.type)
    if dtype is x.dtype or type(weight) not in (Tensor, torch.nn.Parameter):
        return torch.nn.functional.linear(x, weight, bias)
    wide_bias = None if bias is None else bias.to(dtype)
    return torch.nn.functional.linear(x.to(dtype), weight.to(dtype), wide_bias).to(x.dtype)


def matmul(x: Tensor, matrix: Tensor) -> Tensor:
    """Return `x @ matrix` in the dtype of `x`."""
    dtype = product_dtype(x.dtype, x.device.type)
    if dtype is x.dtype is matrix.dtype:
        return x @ matrix
    return (x.to(dtype) @ matrix.to(dtype)).to(x.dtype)


def grouped_mm(x: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    """Return the product of groups of rows by torch, with the result in the dtype of `x`."""
    # The fake implementation that compilers trace accepts only bf16, so nothing is widened there.
    dtype = x.dtype if is_traced(x) else product_dtype(x.dtype, x.device.type)
    return torch._grouped_mm(x.to(dtype), matrices.to(dtype), offs=offs).to(x.dtype)


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
        return matmul(x, w.t() if transposed else w)
    return linear(x, w.t() if transposed else w, bias)
