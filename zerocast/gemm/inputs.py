"""Quantize activations and output gradients to match a weight, by plain torch ops on any device.

FP8 takes one pass for the amaxes, a few operations on the amaxes, and one pass that multiplies in
f32 and stores codes. The last pass ends in torch's own float8 conversion, which rounds to nearest
even in every version. Versions differ in the result for overflow and Inf, but neither reaches the
conversion: `|x| * scale` is at most `largest * (1 + 2**-22)`, and overflow begins half a step above
`largest`. On CUDA tensors `cuda_inputs.py` does the same in a launch or two, or `triton_inputs.py`
if the extension has no kernels for the GPU. Under a compiler the plain operations stay, since it
fuses them itself.

Scales follow docs/formats/common.md, with one difference: if the amax is not finite, the scale is
NaN, and so are all elements of the tensor or group. A weight would saturate, with scale 1. An
activation that overflowed must not look like an ordinary one afterwards. Epsilons are options of
weights and are not applied.
"""

import contextlib
import dataclasses
import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from zerocast.backends import ops
from zerocast.backends.reference.codec import encode, pack
from zerocast.backends.reference.scales import (
    ONE_2688TH,
    block_amax,
    encode_scales,
    expand,
    fill_scales,
    stored_scales,
)
from zerocast.formats import Block, Element, FormatSpec, get_format
from zerocast.formats.element import FP8
from zerocast.formats.layout import rowwise_scale_inv
from zerocast.gemm.scaling import (
    BothWays,
    both_ways_by,
    both_ways_like,
    codes_of,
    encode_scale,
    is_traced,
    reciprocal,
    tensor_both_ways_like,
    turned,
    turned_like,
)

E8M0_NAN = 0xFF


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    """Return the module with the kernels for this GPU; None if only plain operations are left."""
    with contextlib.suppress(ImportError):
        cuda = importlib.import_module("zerocast.gemm.cuda_inputs")
        if cuda.serves(device):
            return cuda
    with contextlib.suppress(ImportError):
        return importlib.import_module("zerocast.gemm.triton_inputs")
    return None


def _fused(x: Tensor) -> ModuleType | None:
    """Return the module with kernels for `x`; None on a CPU and under a compiler, which could fuse
    nothing with a kernel.
    """
    return _kernels(x.device) if x.device.type == "cuda" and not is_traced(x) else None


def per_tensor(x: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """Return (codes `[rows, k]`, scale_inv f32[1]) of `x [rows, k]`, scaled by its current amax."""
    if (fused := _fused(x)) is not None:
        return fused.per_tensor(x, element)  # type: ignore[no-any-return]
    scale = encode_scale(_amax(x), element.max, power_of_2=False)
    return codes_of(x, scale, element), reciprocal(scale)


def _amax(x: Tensor) -> Tensor:
    """Return the greatest magnitude as f32[1]."""
    if is_traced(x):
        # In two steps, since a compiler fuses a reduction over rows with the norm or the activation
        # that made `x`, and a reduction over the whole tensor is a kernel by itself.
        of_rows: Tensor = x.abs().amax(1)
        return of_rows.amax().float().view(1)
    amax: Tensor = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    return amax.view(1)


def rows(x: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """Return (codes of the shape of `x`, scale_inv f32 of that without the last dimension), with
    one scale per row.
    """
    amax = torch.linalg.vector_norm(x, torch.inf, dim=-1, dtype=torch.float32)
    scale = encode_scale(amax, element.max, power_of_2=False)
    return codes_of(x, scale.unsqueeze(-1), element), reciprocal(scale)


def groups(x: Tensor, width: int, element: Element, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Return (codes `[rows, k]`, scale_inv f32 `[rows, k / width]`) of `x [rows, k]`, with one
    scale per `width` elements of a row.
    """
    if (fused := _fused(x)) is not None:
        return fused.groups(x, width, element, power_of_2)  # type: ignore[no-any-return]
    grouped = x.unflatten(1, (-1, width))
    amax = torch.linalg.vector_norm(grouped, torch.inf, dim=2, dtype=torch.float32)
    scale = encode_scale(amax, element.max, power_of_2)
    return codes_of(grouped, scale.unsqueeze(2), element).view(x.shape), reciprocal(scale)


def groups_both_ways(x: Tensor, width: int, element: Element, power_of_2: bool, is_square: bool) -> BothWays:
    """Return `groups` of `x [rows, k]` and of its transpose, from one read of `x`.

    Returns (codes `[rows, k]`, scale_inv f32 `[rows, k / width]`, codes `[k, rows]`, scale_inv f32
    `[k, rows / width]`, rounded up). Both scales are stored column by column, and rows are padded
    with zeros to a multiple of 16. If `is_square`, the last scale_inv is `[rows / width, k /
    width]`, one scale per `width x width` elements, with zeros up to a multiple of 4 rows.
    """
    options = width, element, power_of_2, is_square
    if is_traced(x):
        # One op in the graph. A compiler would read `x` once per direction.
        made: BothWays = torch.ops.zerocast.groups_both_ways(x, width, element.name, power_of_2, is_square)
        return made
    if (fused := _fused(x)) is not None:
        return fused.groups_both_ways(x, *options)  # type: ignore[no-any-return]
    return both_ways_by(groups, x, *options)


def per_tensor_both_ways(x: Tensor, element: Element) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes `[rows, k]`, scale_inv f32[1], codes `[k, rows]`) of `x [rows, k]`, k a
    multiple of 16. The transposed codes are padded with zeros to a multiple of 16 rows.
    """
    if is_traced(x):
        # The amax stays outside of the op, where a compiler fuses it with the operation before.
        made: tuple[Tensor, Tensor, Tensor] = torch.ops.zerocast.tensor_both_ways(x, _amax(x), element.name)
        return made
    if (fused := _fused(x)) is not None:
        return fused.tensor_both_ways(x, None, element)  # type: ignore[no-any-return]
    return _tensor_both_ways(x, _amax(x), element.name)


def per_tensor_recomputed(x: Tensor, element: Element) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `per_tensor_both_ways` in a graph whose backward half makes the
    transposed codes from its saved `x`. No codes are kept between the halves.
    """
    scale = encode_scale(_amax(x), element.max, power_of_2=False)
    # A partitioner saves nodes that are used in both halves and that cannot be fused with their
    # reader. So the transposed codes come from different nodes than the codes of the forward
    # product. A scale is not negative, so its magnitude has the same bits.
    codes_of_gradient = codes_of(x, scale.abs(), element)
    # One op, which turns tiles in shared memory. A compiler would store the transpose from the
    # kernel that computes `x`, one byte per sector.
    turned_codes = torch.ops.zerocast.turned(codes_of_gradient)
    return codes_of(x, scale, element), reciprocal(scale), turned_codes


def _tensor_both_ways(x: Tensor, amax: Tensor, element: str) -> tuple[Tensor, Tensor, Tensor]:
    if (fused := _fused(x)) is not None:
        return fused.tensor_both_ways(x, amax, FP8[element])  # type: ignore[no-any-return]
    scale = encode_scale(amax, FP8[element].max, power_of_2=False)
    codes = codes_of(x, scale, FP8[element])
    return codes, reciprocal(scale), turned(codes)


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
ops.define("turned", "(Tensor codes) -> Tensor", turned, turned_like)


def mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes `[rows, k]`, E8M0 scales u8 `[rup(rows, 128), rup(k/32, 4)]`) of `x [rows, k]`:
    mxfp8 along the rows.
    """
    codes, scales = _microscaled(get_format("mxfp8"), x)
    return codes.view(torch.float8_e4m3fn), scales


def mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bytes u8 `[rows, k/2]`, E8M0 scales u8 `[rup(rows, 128), rup(k/32, 4)]`) of `x [rows,
    k]`: docs/formats/mxfp4.md with one scale per 1x32 elements, where a scale depends on no other.
    """
    codes, scales = _microscaled(get_format("mxfp4", exact_in_fp8=False), x)
    return pack(codes), scales


def _microscaled(fmt: FormatSpec, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes, scale buffer) of `x` with one E8M0 scale per 32 elements of a row."""
    codes, scales, _ = _quantize(fmt, (1, 32), x)
    # The quantizer of weights saturates. A group that is not finite gets the scale NaN instead.
    finite = x.unflatten(1, (-1, 32)).isfinite().all(2)
    scales[: finite.shape[0], : finite.shape[1]].masked_fill_(~finite, E8M0_NAN)
    return codes, scales


def nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (bytes u8 `[rows, k/2]`, E4M3 scales u8 `[rup(rows, 128), rup(k/16, 4)]`, decode
    factor f32[1] of the tensor) of `x [rows, k]`.

    docs/formats/nvfp4.md with one scale per 1x16 elements, as for activations; rounds to nearest,
    without Hadamard transform.
    """
    fmt = get_format("nvfp4")
    codes, scales, amax = _quantize(fmt, (1, 16), x)
    # E4M3 scales saturate, so the factor of the tensor carries the NaN of an input that overflowed.
    amax = amax.masked_fill(~x.isfinite().all(), torch.nan)
    return pack(codes), scales, decode_factor(amax)


def decode_factor(amax: Tensor) -> Tensor:
    """Return the factor f32[1], from the tensor amax, of a product of NVFP4 codes and E4M3
    scales.
    """
    return amax.view(1) * ONE_2688TH


def _quantize(fmt: FormatSpec, block: Block, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scale buffer, tensor amax) of `x`, quantized as the rowwise copy of a weight
    of `fmt` with blocks of the extent `block`.
    """
    fmt = dataclasses.replace(fmt, block=block)
    assert fmt.element
    rows, columns = x.shape
    buffer = rowwise_scale_inv(fmt, rows, columns)
    assert buffer
    value = x.float()
    grid = block_amax(value, block)
    amax = grid.amax()
    scales = expand(encode_scales(fmt, grid, amax, None), block, rows, columns)
    codes = encode(fmt.element, value * scales)
    return codes, fill_scales(stored_scales(fmt, grid, amax, None), fmt.scale_repeat(), buffer), amax
