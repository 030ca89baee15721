"""Stages quantize_gradient and add_gradients: gradients that are sent between ranks as FP8, in
groups of 128 elements with one scale, or in their dtype.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.triton.codec import INF, as_f32, decode, encode, magnitude
from zerocast.backends.triton.launch import launch
from zerocast.formats.layout import GradientMessage

# Groups per program of quantize_gradient, and elements per program of add_gradients.
GROUPS = 32
RUN = 2048
FLT_MAX = tl.constexpr(0x7F7FFFFF)
ONE = tl.constexpr(0x3F800000)
NAN = tl.constexpr(0x7FC00000)


def quantize_gradient(grad: Tensor, parts: int, messages: Tensor) -> None:
    """Write the message of each of `parts` equal parts of a gradient."""
    part = GradientMessage(grad.numel() // parts)
    tiles = triton.cdiv(part.groups, GROUPS)
    sizes = part.numel, part.groups, part.scales_at, part.nbytes, tiles
    words, is_bf16 = _words(grad)
    constants = {"GROUP": part.GROUP, "GROUPS": GROUPS, "BF16": is_bf16}
    launch(_quantize, parts * tiles, grad.device, words, messages, *sizes, **constants)


def add_gradients(messages: Tensor, parts: int, divisor: int, adds: bool, out: Tensor) -> None:
    """Add the messages of `parts` ranks in the order of the ranks, divide, and store the mean in
    `out` or add it to `out`.
    """
    part = GradientMessage(out.numel())
    is_fp8 = messages.dtype is torch.uint8
    words, is_bf16 = _words(messages)
    sizes = part.numel, part.scales_at, part.nbytes if is_fp8 else part.numel, float(divisor)
    constants = {"PARTS": parts, "ADDS": adds, "FP8": is_fp8, "BF16": is_bf16, "GROUP": part.GROUP, "RUN": RUN}
    launch(_add, triton.cdiv(part.numel, RUN), out.device, words, out, *sizes, **constants)


def _words(gradient: Tensor) -> tuple[Tensor, bool]:
    """Return a gradient as kernels read it, and whether it is bf16. Triton's interpreter loses the
    subnormals of bf16, so kernels read bf16 as integers.
    """
    is_bf16 = gradient.dtype is torch.bfloat16
    return gradient.view(torch.int16) if is_bf16 else gradient, is_bf16


@triton.jit
def _quantize(
    grad,
    messages,
    numel,
    groups,
    scales_at,
    nbytes,
    tiles,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BF16: tl.constexpr,
):
    part = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    message = messages + part * nbytes
    group = tile.to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    i = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = _widened(grad + part * numel + i, i < numel, BF16)
    amax = tl.max(magnitude(x), 1)
    scale = tl.minimum(tl.div_rn(448.0, as_f32(amax)).to(tl.int32, bitcast=True), FLT_MAX)
    scale = tl.where(amax == 0, ONE, scale)
    scale = tl.where(amax >= INF, NAN, scale)
    scale_inv = tl.where(amax >= INF, NAN, tl.div_rn(1.0, as_f32(scale)).to(tl.int32, bitcast=True))
    tl.store(message + i, encode(x * as_f32(scale)[:, None], "e4m3").to(tl.uint8), mask=i < numel)
    tl.store((message + scales_at).to(tl.pointer_type(tl.int32)) + group, scale_inv, mask=group < groups)
    if tile == 0:
        gap = numel + tl.arange(0, 16)
        end = scales_at + 4 * groups + tl.arange(0, 16)
        tl.store(message + gap, (gap * 0).to(tl.uint8), mask=gap < scales_at)
        tl.store(message + end, (end * 0).to(tl.uint8), mask=end < nbytes)


@triton.jit
def _add(
    messages,
    out,
    numel,
    scales_at,
    stride,
    divisor,
    PARTS: tl.constexpr,
    ADDS: tl.constexpr,
    FP8: tl.constexpr,
    BF16: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * RUN + tl.arange(0, RUN)
    here = i < numel
    total = _values(messages, i, here, scales_at, FP8, BF16, GROUP)
    for _ in range(1, PARTS):
        messages += stride
        total = total + _values(messages, i, here, scales_at, FP8, BF16, GROUP)
    mean = tl.div_rn(total, divisor)
    if ADDS:
        mean = tl.load(out + i, mask=here, other=0.0) + mean
    tl.store(out + i, mean, mask=here)


@triton.jit
def _values(message, i, here, scales_at, FP8: tl.constexpr, BF16: tl.constexpr, GROUP: tl.constexpr):
    """Return the elements `i` of one message."""
    if FP8:
        codes = tl.load(message + i, mask=here, other=0).to(tl.int32)
        scales = (message + scales_at).to(tl.pointer_type(tl.float32))
        return decode(codes, "e4m3") * tl.load(scales + i // GROUP, mask=here, other=0.0)
    else:
        return _widened(message + i, here, BF16)


@triton.jit
def _widened(at, here, BF16: tl.constexpr):
    """Return elements of a gradient as f32."""
    x = tl.load(at, mask=here, other=0)
    if BF16:
        x = as_f32(x.to(tl.int32) << 16)
    return x.to(tl.float32)
