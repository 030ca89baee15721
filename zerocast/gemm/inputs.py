"""The other operand: activations and output gradients, quantized to match a weight, by plain torch
ops on any device.

FP8 takes one pass for the amaxes, a few operations on the amaxes, and one pass that multiplies in
f32 and stores codes. That pass ends in torch's own float8 conversion, which rounds to nearest even
in every version; versions differ in what overflow and Inf become, and neither reaches it:
`|x| * scale` is at most `largest * (1 + 2**-22)`, and overflow begins half a step above `largest`.
On CUDA tensors `cuda_inputs.py` does the same in a launch or two, and `triton_inputs.py` where the
extension has no kernels for the GPU, unless a compiler is at work, which fuses plain operations
itself.

Scales follow docs/formats/common.md, with one difference: where the amax is not finite the scale is
no number, so that the whole tensor (the whole group) comes out as NaN. A weight saturates there,
with scale 1; an activation that overflowed must not look like an ordinary one afterwards. Epsilons
are options of weights and are not applied.
"""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from zerocast import backends
from zerocast.backends import ops
from zerocast.backends.reference.codec import encode, pack
from zerocast.backends.reference.scales import ONE_2688TH, block_amax, encode_scales, expand, fill_scales, stored_scales
from zerocast.formats import Block, Element, FormatSpec, get_format
from zerocast.formats.element import FP8
from zerocast.formats.layout import rowwise_scale_inv

# codes `[rows, k]` and their scales, codes `[k, rows]` and theirs
BothWays = tuple[Tensor, Tensor, Tensor, Tensor]

ROWS = 16  # products whose inner dimension is the rows take multiples of this, and so do blocked ones
FLT_MAX = torch.finfo(torch.float32).max
E8M0_NAN = 0xFF


def encode_scale(amax: Tensor, largest: float, power_of_2: bool) -> Tensor:
    """`largest / amax` in f32, floored to a power of two if wished, 1 for an amax of 0, NaN for
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


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    """The module that quantizes on this GPU; None leaves it to plain operations."""
    with contextlib.suppress(ImportError):
        cuda = importlib.import_module("zerocast.gemm.cuda_inputs")
        if cuda.serves(device):
            return cuda
    with contextlib.suppress(ImportError):
        return importlib.import_module("zerocast.gemm.triton_inputs")
    return None


def is_traced(x: Tensor) -> bool:
    """Whether a tensor has no memory of its own, as while a compiler traces, which it does not
    say of itself in every version.
    """
    return type(x) is not Tensor and is_fake(x)


def _fused(x: Tensor) -> ModuleType | None:
    return _kernels(x.device) if x.device.type == "cuda" and not is_traced(x) else None


def per_tensor(x: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """(codes `[rows, k]`, scale_inv f32[1]) of `x [rows, k]`, scaled by its present amax."""
    if (fused := _fused(x)) is not None:
        return fused.per_tensor(x, element)  # type: ignore[no-any-return]
    scale = encode_scale(_amax(x), element.max, power_of_2=False)
    return _codes(x, scale, element), reciprocal(scale)


def _amax(x: Tensor) -> Tensor:
    """The greatest magnitude as f32[1]."""
    if is_traced(x):  # a norm of the rows, or an activation, takes the amaxes of its rows along
        of_rows: Tensor = x.abs().amax(1)
        return of_rows.amax().float().view(1)
    amax: Tensor = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    return amax.view(1)


def groups(x: Tensor, width: int, element: Element, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """(codes `[rows, k]`, scale_inv f32 `[rows, k / width]`) of `x [rows, k]`, a scale for
    `width` elements of a row.
    """
    if (fused := _fused(x)) is not None:
        return fused.groups(x, width, element, power_of_2)  # type: ignore[no-any-return]
    grouped = x.unflatten(1, (-1, width))
    amax = torch.linalg.vector_norm(grouped, torch.inf, dim=2, dtype=torch.float32)
    scale = encode_scale(amax, element.max, power_of_2)
    return _codes(grouped, scale.unsqueeze(2), element).view(x.shape), reciprocal(scale)


def groups_both_ways(x: Tensor, width: int, element: Element, power_of_2: bool, is_square: bool) -> BothWays:
    """`groups` of `x [rows, k]` and of its transpose, from one read of it.

    (codes `[rows, k]`, scale_inv f32 `[rows, k / width]`, codes `[k, rows]`, scale_inv f32
    `[k, rows / width]`, rounded up); both scales lie column by column, rows are padded with zeros
    to a multiple of 16. If `is_square`, the last scale_inv is `[rows / width, k / width]`, one for
    `width x width` elements, with zeros up to a multiple of 4 rows. It stays one op in a graph: a
    compiler would read `x` once for each direction.
    """
    options = width, element, power_of_2, is_square
    if is_traced(x):
        made: BothWays = torch.ops.zerocast.groups_both_ways(x, width, element.name, power_of_2, is_square)
        return made
    if (fused := _fused(x)) is not None:
        return fused.groups_both_ways(x, *options)  # type: ignore[no-any-return]
    return both_ways_by(groups, x, *options)


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


def both_ways_like(x: Tensor, width: int, element: Element, is_square: bool) -> BothWays:
    """Memory for the results of `groups_both_ways`."""
    rows, k = -(-x.shape[0] // ROWS) * ROWS, x.shape[1]
    bands = -(-rows // width)
    codes, turned = (x.new_empty(shape, dtype=element.dtype) for shape in ((rows, k), (k, rows)))
    of_columns = (k // width, -(-bands // 4) * 4) if is_square else (bands, k)
    scale_inv, turned_scale_inv = (x.new_empty(s, dtype=torch.float32) for s in ((k // width, rows), of_columns))
    return codes, scale_inv.t(), turned, turned_scale_inv.t()


def _squares(x: Tensor, width: int, element: Element, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """(codes `[k, rows]`, scale_inv `[rows / width, k / width]`) of `x [k, rows]`."""
    tiles = x.unflatten(1, (-1, width)).unflatten(0, (-1, width))
    amax = torch.linalg.vector_norm(tiles, torch.inf, dim=(1, 3), dtype=torch.float32)
    scale = encode_scale(amax, element.max, power_of_2)
    return _codes(tiles, scale[:, None, :, None], element).view(x.shape), reciprocal(scale).t()


def per_tensor_both_ways(x: Tensor, element: Element) -> tuple[Tensor, Tensor, Tensor]:
    """(codes `[rows, k]`, scale_inv f32[1], codes `[k, rows]`) of `x [rows, k]`, k a multiple of
    16; the last are padded with zeros to a multiple of 16 rows.

    In a graph the amax fuses with what made `x`; the codes are one op.
    """
    if is_traced(x):
        made: tuple[Tensor, Tensor, Tensor] = torch.ops.zerocast.tensor_both_ways(x, _amax(x), element.name)
        return made
    if (fused := _fused(x)) is not None:
        return fused.tensor_both_ways(x, None, element)  # type: ignore[no-any-return]
    return _tensor_both_ways(x, _amax(x), element.name)


def tensor_both_ways_like(x: Tensor, element: Element) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the results of `per_tensor_both_ways`."""
    rows, k = x.shape
    turned = x.new_empty((k, -(-rows // ROWS) * ROWS), dtype=element.dtype)
    return x.new_empty((rows, k), dtype=element.dtype), x.new_empty(1, dtype=torch.float32), turned


def _tensor_both_ways(x: Tensor, amax: Tensor, element: str) -> tuple[Tensor, Tensor, Tensor]:
    if (fused := _fused(x)) is not None:
        return fused.tensor_both_ways(x, amax, FP8[element])  # type: ignore[no-any-return]
    scale = encode_scale(amax, FP8[element].max, power_of_2=False)
    codes = _codes(x, scale, FP8[element])
    return codes, reciprocal(scale), turned(codes)


def padded(x: Tensor, multiple: int) -> Tensor:
    """`x [rows, k]` with rows of zeros up to a multiple."""
    missing = -x.shape[0] % multiple
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


ops.define(
    "groups_both_ways",
    "(Tensor x, int width, str element, bool power_of_2, bool is_square) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, width, element, *options: groups_both_ways(x, width, FP8[element], *options),
    lambda x, width, element, _, is_square: both_ways_like(x, width, FP8[element], is_square),
)
ops.define(
    "tensor_both_ways",
    "(Tensor x, Tensor amax, str element) -> (Tensor, Tensor, Tensor)",
    _tensor_both_ways,
    lambda x, amax, element: tensor_both_ways_like(x, FP8[element]),
)


def turned(codes: Tensor) -> Tensor:
    """FP8 codes `[rows, k]` as `[k, rows]`, with zeros up to a multiple of `ROWS`."""
    codes = padded(codes.view(torch.uint8), ROWS).view(codes.dtype)
    if is_traced(codes):
        return codes.t().contiguous()
    backend = backends.choose(codes.device)
    data: Tensor = ops.transposed(backend, "fp8_current", codes.view(torch.uint8), None, *codes.shape)[0]
    return data.view(codes.dtype)


def _codes(x: Tensor, scale: Tensor, element: Element) -> Tensor:
    """`x * scale` in f32, stored as codes, in one pass."""
    if is_traced(x):
        return (x * scale).to(element.dtype).contiguous()
    codes = torch.empty(x.shape, dtype=element.dtype, device=x.device)
    return torch.mul(x, scale, out=codes)


def mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes `[rows, k]`, E8M0 scales u8 `[rup(rows, 128), rup(k/32, 4)]`) of `x [rows, k]`:
    mxfp8 along the rows.
    """
    fmt = get_format("mxfp8")
    codes, scales, _ = _quantize(fmt, (1, 32), x)
    finite = x.unflatten(1, (-1, 32)).isfinite().all(2)
    scales[: finite.shape[0], : finite.shape[1]].masked_fill_(~finite, E8M0_NAN)
    return codes.view(torch.float8_e4m3fn), scales


def nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(bytes u8 `[rows, k/2]`, E4M3 scales u8 `[rup(rows, 128), rup(k/16, 4)]`, f32[1] that both
    levels are decoded with).

    docs/formats/nvfp4.md with a scale for 1x16 elements, as for activations; rounds to nearest,
    without Hadamard transform.
    """
    codes, scales, amax = _quantize(get_format("nvfp4"), (1, 16), x)
    return pack(codes), scales, decode_factor(amax.masked_fill(~x.isfinite().all(), torch.nan))


def decode_factor(amax: Tensor) -> Tensor:
    """What a product of NVFP4 codes and E4M3 scales is multiplied by: f32[1], from the tensor
    amax.
    """
    return amax.view(1) * ONE_2688TH


def _quantize(fmt: FormatSpec, block: Block, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale buffer, tensor amax) of `x` in the rowwise direction of `fmt` with blocks of
    another extent.
    """
    fmt = dataclasses.replace(fmt, block=block)
    assert fmt.element
    rows, columns = x.shape
    buffer = rowwise_scale_inv(fmt, rows, columns)
    assert buffer
    value = x.float()
    grid = block_amax(value, block)
    amax = grid.amax()
    codes = encode(fmt.element, value * expand(encode_scales(fmt, grid, amax, None), block, rows, columns))
    return codes, fill_scales(stored_scales(fmt, grid, amax, None), fmt.scale_repeat(), buffer), amax
