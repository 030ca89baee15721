"""Scales and codes of an operand by plain torch ops, and the memory that an operand takes in both
directions: what the quantizers of `inputs.py`, `cuda_inputs.py` and `triton_inputs.py` share.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from zerocast import backends
from zerocast.backends import ops
from zerocast.formats import Element

# codes `[rows, k]` and their scales, codes `[k, rows]` and theirs
BothWays = tuple[Tensor, Tensor, Tensor, Tensor]

ROWS = 16  # products whose inner dimension is the rows take multiples of this, and so do blocked ones
FLT_MAX = torch.finfo(torch.float32).max


def is_traced(x: Tensor) -> bool:
    """True if a tensor has no memory of its own, as while a compiler traces, which it does not
    say of itself in every version.
    """
    return type(x) is not Tensor and is_fake(x)


def encode_scale(amax: Tensor, largest: float, power_of_2: bool) -> Tensor:
    """`largest / amax` in f32, floored to a power of two if asked for, 1 for an amax of 0, NaN for
    one that is not finite.
    """
    scale = _quotient(largest, amax).clamp(max=FLT_MAX)
    if power_of_2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale.masked_fill(amax == 0, 1.0) + (amax - amax)


def reciprocal(scale: Tensor) -> Tensor:
    """1 / scale, correctly rounded, as f32."""
    return _quotient(1.0, scale)


def _quotient(number: float, divisor: Tensor) -> Tensor:
    """In f64, which rounds to the same f32: compilers divide f32 approximately, and torch
    multiplies by a reciprocal.
    """
    divisor = divisor.double()
    return torch.div(torch.full_like(divisor, number), divisor).float()


def codes_of(x: Tensor, scale: Tensor, element: Element) -> Tensor:
    """`x * scale` in f32, stored as codes, in one pass."""
    if is_traced(x):
        return (x * scale).to(element.dtype).contiguous()
    codes = torch.empty(x.shape, dtype=element.dtype, device=x.device)
    return torch.mul(x, scale, out=codes)


def padded(x: Tensor, multiple: int) -> Tensor:
    """`x [rows, k]` with rows of zeros up to a multiple."""
    missing = -x.shape[0] % multiple
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def turned(codes: Tensor) -> Tensor:
    """FP8 codes `[rows, k]` as `[k, rows]`, with zeros up to a multiple of `ROWS`."""
    codes = padded(codes.view(torch.uint8), ROWS).view(codes.dtype)
    if is_traced(codes):
        return codes.t().contiguous()
    backend = backends.choose(codes.device)
    data: Tensor = ops.transposed(backend, "fp8_current", codes.view(torch.uint8), None, *codes.shape)[0]
    return data.view(codes.dtype)


def both_ways_like(x: Tensor, width: int, element: Element, is_square: bool) -> BothWays:
    """Memory for the results of `groups_both_ways`."""
    rows, k = -(-x.shape[0] // ROWS) * ROWS, x.shape[1]
    bands, dtype = -(-rows // width), element.dtype
    of_columns = (k // width, -(-bands // 4) * 4) if is_square else (bands, k)
    codes, turned = x.new_empty((rows, k), dtype=dtype), x.new_empty((k, rows), dtype=dtype)
    scale_inv, turned_scale_inv = (
        x.new_empty((k // width, rows), dtype=torch.float32),
        x.new_empty(of_columns, dtype=torch.float32),
    )
    return codes, scale_inv.t(), turned, turned_scale_inv.t()


def tensor_both_ways_like(x: Tensor, element: Element) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the results of `per_tensor_both_ways`."""
    rows, k = x.shape
    turned = x.new_empty((k, -(-rows // ROWS) * ROWS), dtype=element.dtype)
    return x.new_empty((rows, k), dtype=element.dtype), x.new_empty(1, dtype=torch.float32), turned


def both_ways_by(
    quantize: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    width: int,
    element: Element,
    power_of_2: bool,
    is_square: bool,
) -> BothWays:
    """`groups_both_ways` from two calls of a `groups`, the second one of a transpose."""
    made = both_ways_like(x, width, element, is_square)
    of_rows = quantize(padded(x, ROWS), width, element, power_of_2)
    turned = padded(x, width).t().contiguous()
    of_columns = (_squares if is_square else quantize)(turned, width, element, power_of_2)
    for ours, theirs in zip(made, (*of_rows, *of_columns), strict=True):
        ours[: len(theirs)].copy_(theirs[:, : ours.shape[1]])
        ours[len(theirs) :] = 0
    return made


def _squares(x: Tensor, width: int, element: Element, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """(codes `[k, rows]`, scale_inv `[rows / width, k / width]`) of `x [k, rows]`."""
    tiles = x.unflatten(1, (-1, width)).unflatten(0, (-1, width))
    amax = torch.linalg.vector_norm(tiles, torch.inf, dim=(1, 3), dtype=torch.float32)
    scale = encode_scale(amax, element.max, power_of_2)
    return codes_of(tiles, scale[:, None, :, None], element).view(x.shape), reciprocal(scale).t()
