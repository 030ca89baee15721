"""Stage dequantize: one direction of one weight back to floating point."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.triton.codec import DTYPES, bf16_bits, decode, fp16_bits
from zerocast.backends.triton.launch import addresses, launch
from zerocast.backends.triton.scales import FP32, TWO_LEVEL, decode_scale
from zerocast.backends.triton.tiles import load_f32, load_raw, offsets, store_raw
from zerocast.formats import Columnwise, FormatSpec, ScaleRule

SIDE = 64


def dequantize(
    fmt: FormatSpec,
    data: Tensor,
    scale_inv: Tensor | None,
    amax: Tensor | None,
    rows: int,
    columns: int,
    columnwise: bool,
    out: Tensor,
) -> None:
    """See ../README.md."""
    assert data.is_contiguous() and out.is_contiguous() and (scale_inv is None or scale_inv.is_contiguous())
    transposed = columnwise and fmt.columnwise is Columnwise.TRANSPOSE
    height, width = (columns, rows) if transposed else (rows, columns)
    programs = -(-height // SIDE) * -(-width // SIDE)
    device = data.device
    present = [tensor if tensor is not None else data for tensor in (data, scale_inv, amax, out)]
    bases = addresses(present, device)
    if fmt.element is None:
        dtypes = {"DTYPE": DTYPES[data.dtype], "OUT": DTYPES[out.dtype]}
        launch(_round, programs, device, bases, height, width, SIDE_A=SIDE, **dtypes)
        return
    assert scale_inv is not None
    block = fmt.columnwise_block if columnwise and fmt.columnwise is Columnwise.OWN_GRID else fmt.block
    constants: dict[str, Any] = {
        "TRANSPOSED": transposed,
        "ROWS_A": block[0] if block else 0,
        "COLUMNS_A": block[1] if block else 0,
        "REPEAT": block[0] if block and fmt.scale_rule is ScaleRule.TWO_LEVEL else 1,
        "ELEMENT": fmt.element.name,
        "RULE": int(fmt.scale_rule),
        "OUT": DTYPES[out.dtype],
        "SIDE_A": SIDE,
    }
    launch(_decode, programs, device, bases, height, width, scale_inv.shape[-1], **constants)


@triton.jit
def _origin(height, width, SIDE_A: tl.constexpr):
    """(first row, first column) of this program's square, as int64."""
    tile = tl.program_id(0).to(tl.int64)
    across = (width + SIDE_A - 1) // SIDE_A
    return tile // across * SIDE_A, tile % across * SIDE_A


@triton.jit
def _words(x, DTYPE: tl.constexpr):
    """f32 rounded to a dtype, as integers of its width."""
    if DTYPE == tl.bfloat16:
        return (bf16_bits(x) >> 16).to(tl.int16)
    elif DTYPE == tl.float16:
        return fp16_bits(x).to(tl.int16)
    else:
        return x.to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["height", "width"])
def _round(bases, height, width, SIDE_A: tl.constexpr, DTYPE: tl.constexpr, OUT: tl.constexpr):
    top, left = _origin(height, width, SIDE_A)
    mask = (top + tl.arange(0, SIDE_A)[:, None] < height) & (left + tl.arange(0, SIDE_A)[None, :] < width)
    i = top * width + left + offsets(width.to(tl.int64), SIDE_A, SIDE_A, False)
    word: tl.constexpr = tl.int32 if OUT == tl.float32 else tl.int16
    if DTYPE == OUT:
        bits = load_raw(tl.load(bases), i, mask, word, False)
    else:
        bits = _words(load_f32(tl.load(bases), i, mask, DTYPE, False), OUT)
    store_raw(tl.load(bases + 3), i, bits, mask, word, False)


@triton.jit(do_not_specialize=["height", "width", "scale_width"])
def _decode(
    bases,
    height,
    width,
    scale_width,
    TRANSPOSED: tl.constexpr,
    ROWS_A: tl.constexpr,
    COLUMNS_A: tl.constexpr,
    REPEAT: tl.constexpr,
    ELEMENT: tl.constexpr,
    RULE: tl.constexpr,
    OUT: tl.constexpr,
    SIDE_A: tl.constexpr,
):
    """A square of the stored matrix `[height, width]`; written transposed where that is the weight's orientation."""
    top, left = _origin(height, width, SIDE_A)
    r = top + tl.arange(0, SIDE_A)[:, None]
    c = left + tl.arange(0, SIDE_A)[None, :]
    mask = (r < height) & (c < width)
    if ELEMENT == "e2m1":
        byte = load_raw(tl.load(bases), (r * width + c) // 2, mask, tl.uint8, False).to(tl.int32)
        code = (byte >> (c % 2 * 4).to(tl.int32)) & 0xF
    else:
        code = load_raw(tl.load(bases), r * width + c, mask, tl.uint8, False).to(tl.int32)
    if ROWS_A:
        at = r // ROWS_A * REPEAT * scale_width + c // COLUMNS_A
    else:
        at = r * 0 + c * 0
    if RULE == FP32:
        stored = load_raw(tl.load(bases + 1), at, mask, tl.float32, False)
    else:
        stored = load_raw(tl.load(bases + 1), at, mask, tl.uint8, False).to(tl.int32)
    amax = tl.full((), 1.0, tl.float32)
    if RULE == TWO_LEVEL:
        amax = tl.load(tl.load(bases + 2).to(tl.pointer_type(tl.float32)))
    words = _words(decode(code, ELEMENT) * decode_scale(stored, amax, RULE), OUT)
    word: tl.constexpr = tl.int32 if OUT == tl.float32 else tl.int16
    if TRANSPOSED:
        r, c = left + tl.arange(0, SIDE_A)[:, None], top + tl.arange(0, SIDE_A)[None, :]
        store_raw(tl.load(bases + 3), r * height + c, tl.trans(words), (r < width) & (c < height), word, False)
    else:
        store_raw(tl.load(bases + 3), r * width + c, words, mask, word, False)
