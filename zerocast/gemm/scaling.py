"""Helpers of the quantizers in `inputs.py`, `cuda_inputs.py` and `triton_inputs.py`: scales and
codes by plain torch ops, and the memory for the results in both directions.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from zerocast import backends
from zerocast.backends import ops
from zerocast.formats import Element

# (codes `[rows, k]`, their decode scales, codes `[k, rows]`, their decode scales)
BothWays = tuple[Tensor, Tensor, Tensor, Tensor]

# Rows are padded to a multiple of this. cuBLAS needs it of an inner dimension, which the rows are
# in a weight gradient, and of the rows of an operand with block scales.
ROWS = 16
FLT_MAX = torch.finfo(torch.float32).max


def is_traced(x: Tensor) -> bool:
    """Return True if a tensor is fake, as while a compiler traces."""
    # `torch.compiler.is_compiling()` is not True in every version of torch while a graph is traced.
    return type(x) is not Tensor and is_fake(x)


def encode_scale(amax: Tensor, largest: float, power_of_2: bool) -> Tensor:
    """Return the encode scale `largest / amax` in f32, rounded down to a power of two if
    `power_of_2`. It is 1 for an amax of 0, and NaN for an amax that is not finite.
    """
    # A subnormal amax would give Inf.
    scale = _quotient(largest, amax).clamp(max=FLT_MAX)
    if power_of_2:
        # Clearing sign and mantissa leaves the power of two below.
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    # amax - amax is 0 for a finite amax, otherwise NaN.
    return scale.masked_fill(amax == 0, 1.0) + (amax - amax)


def reciprocal(scale: Tensor) -> Tensor:
    """Return 1 / scale, correctly rounded, as f32."""
    return _quotient(1.0, scale)


def _quotient(number: float, divisor: Tensor) -> Tensor:
    """Return `number / divisor`, correctly rounded to f32."""
    # Compilers divide f32 approximately, and torch multiplies by a reciprocal if the dividend is a
    # number. A division of f64 tensors that is rounded to f32 gives the same bits everywhere.
    divisor = divisor.double()
    return torch.div(torch.full_like(divisor, number), divisor).float()


def codes_of(x: Tensor, scale: Tensor, element: Element) -> Tensor:
    """Return the codes of `x * scale`, which is computed in f32, in one pass over `x`."""
    if is_traced(x):
        return (x * scale).to(element.dtype).contiguous()
    # `out=` converts on the way to memory. The f32 product is never stored.
    codes = torch.empty(x.shape, dtype=element.dtype, device=x.device)
    return torch.mul(x, scale, out=codes)


def padded(x: Tensor, multiple: int) -> Tensor:
    """Return `x [rows, k]` with zero rows appended up to a multiple of `multiple`."""
    missing = -x.shape[0] % multiple
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def turned(codes: Tensor) -> Tensor:
    """Return the transpose `[k, rows]` of FP8 codes `[rows, k]`, with rows padded with zeros to a
    multiple of `ROWS`.
    """
    if codes.shape[0] % ROWS:
        codes = padded(codes.view(torch.uint8), ROWS).view(codes.dtype)
    transposition, shape = _turning(codes.device, *codes.shape)
    made = torch.empty(shape, dtype=codes.dtype, device=codes.device)
    transposition.run([codes.contiguous()], [], [made], [])
    return made


@functools.lru_cache(maxsize=1024)
def _turning(device: torch.device, rows: int, k: int) -> tuple[ops.Transposition, tuple[int, ...]]:
    """Return the transposition of codes `[rows, k]`, and the shape of its result. Every product
    asks.
    """
    transposition = ops.transposition(backends.choose(device), "fp8_current", ((rows, k),), device)
    ((shape, _, _),) = transposition.made
    return transposition, shape


def turned_like(codes: Tensor) -> Tensor:
    """Return uninitialized memory for the result of `turned`."""
    rows, k = codes.shape
    return torch.empty((k, -(-rows // ROWS) * ROWS), dtype=codes.dtype, device=codes.device)


def both_ways_like(x: Tensor, width: int, element: Element, is_square: bool) -> BothWays:
    """Return uninitialized memory for the results of `inputs.groups_both_ways`."""
    rows = -(-x.shape[0] // ROWS) * ROWS
    k = x.shape[1]
    row_groups = -(-rows // width)
    # `new_empty` calls `empty`, and a view is one more call. Every product allocates these.
    device = x.device
    codes = torch.empty((rows, k), dtype=element.dtype, device=device)
    turned = torch.empty((k, rows), dtype=element.dtype, device=device)
    # cuBLAS reads scales column by column. Scales of square blocks have their number of rows padded
    # to a multiple of 4, as the scales of a weight are.
    shape = (-(-row_groups // 4) * 4, k // width) if is_square else (k, row_groups)
    scale_inv = torch.empty_strided((rows, k // width), (1, rows), dtype=torch.float32, device=device)
    turned_scale_inv = torch.empty_strided(shape, (1, shape[0]), dtype=torch.float32, device=device)
    return codes, scale_inv, turned, turned_scale_inv


def tensor_both_ways_like(x: Tensor, element: Element) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized memory for the results of `inputs.per_tensor_both_ways`."""
    rows, k = x.shape
    codes = torch.empty((rows, k), dtype=element.dtype, device=x.device)
    scale_inv = torch.empty(1, dtype=torch.float32, device=x.device)
    return codes, scale_inv, turned_like(codes)


def both_ways_by(
    quantize: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    width: int,
    element: Element,
    power_of_2: bool,
    is_square: bool,
) -> BothWays:
    """Return `groups_both_ways` by two calls of `quantize`, an implementation of `groups`: one for
    `x` and one for its transpose.
    """
    results = both_ways_like(x, width, element, is_square)
    rowwise = quantize(padded(x, ROWS), width, element, power_of_2)
    turned = padded(x, width).t().contiguous()
    columnwise = (_squares if is_square else quantize)(turned, width, element, power_of_2)
    # The calls pad to complete groups, which may be more columns than the result has, and do not
    # pad the rows of square scales. So copy the common part and fill the rest with zeros.
    for result, computed in zip(results, (*rowwise, *columnwise), strict=True):
        result[: len(computed)].copy_(computed[:, : result.shape[1]])
        result[len(computed) :] = 0
    return results


def _squares(x: Tensor, width: int, element: Element, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Return (codes `[k, rows]`, scale_inv `[rows / width, k / width]`) of `x [k, rows]`."""
    tiles = x.unflatten(1, (-1, width)).unflatten(0, (-1, width))
    amax = torch.linalg.vector_norm(tiles, torch.inf, dim=(1, 3), dtype=torch.float32)
    scale = encode_scale(amax, element.max, power_of_2)
    return codes_of(tiles, scale[:, None, :, None], element).view(x.shape), reciprocal(scale).t()
