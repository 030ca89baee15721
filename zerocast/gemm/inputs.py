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
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from zerocast import backends
from zerocast.backends import ops
from zerocast.backends.reference.codec import encode, pack
from zerocast.backends.reference.scales import ONE_2688TH, block_amax, encode_scales, expand, fill_scales, stored_scales
from zerocast.formats import Block, Element, FormatSpec, get_format
from zerocast.formats.layout import rowwise_scale_inv

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
    if is_traced(x):  # a norm of the rows, or an activation, takes the amaxes of its rows along
        amax = x.abs().amax(1).amax().float().view(1)
    else:
        amax = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32).view(1)
    scale = encode_scale(amax, element.max, power_of_2=False)
    return _codes(x, scale, element), reciprocal(scale)


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


def groups_of_rows(x: Tensor, height: int, element: Element, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """(codes `[k, rows]`, scale_inv f32 `[k, rows / height]` column by column) of `x [rows, k]`:
    `groups` of its transpose.
    """
    if not is_traced(x):
        codes, scale_inv = groups(x.t().contiguous(), height, element, power_of_2)
        return codes, scale_inv.t().contiguous().t()
    # read as it lies: a compiler would reduce a transpose in strides
    grouped = x.unflatten(0, (-1, height))
    scale = encode_scale(grouped.abs().amax(1).float(), element.max, power_of_2)
    return _codes(grouped, scale.unsqueeze(1), element).view(x.shape).t().contiguous(), reciprocal(scale).t()


def turned(codes: Tensor) -> Tensor:
    """FP8 codes `[rows, k]` as `[k, rows]`, with zeros up to a multiple of 16 rows."""
    if missing := -codes.shape[0] % 16:
        codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, 0, 0, missing)).view(codes.dtype)
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
