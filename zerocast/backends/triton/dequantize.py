"""Stage dequantize: one direction of one weight back to floating point."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.triton.codec import DTYPES, bf16_bits, codes_per_byte, decode, fp16_bits
from zerocast.backends.triton.launch import addresses, launch
from zerocast.backends.triton.scales import BF16, FP32, TWO_LEVEL, decode_scale
from zerocast.backends.triton.tiles import load_f32, load_raw, offsets, store_raw
from zerocast.formats import Columnwise, FormatSpec

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
    """Write one direction of one weight to `out`, in the dtype of `out`."""
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
        "DOWN": max(1, SIDE // block[0]) if block else 1,
        "ACROSS": max(1, SIDE // block[1]) if block else 1,
        "ROWS_A": block[0] if block else 0,
        "COLUMNS_A": block[1] if block else 0,
        "REPEAT": fmt.scale_repeat(columnwise)[0],
        "REPEAT_COLUMNS": fmt.scale_repeat(columnwise)[1],
        "ELEMENT": fmt.element.name,
        "RULE": int(fmt.scale_rule),
        "OUT": DTYPES[out.dtype],
        "SIDE_A": SIDE,
    }
    launch(_decode, programs, device, bases, height, width, scale_inv.shape[-1], **constants)


@triton.jit
def _origin(height, width, SIDE_A: tl.constexpr):
    """Return (first row, first column) of this program's square tile, as int64."""
    tile = tl.program_id(0).to(tl.int64)
    tile_columns = (width + SIDE_A - 1) // SIDE_A
    return tile // tile_columns * SIDE_A, tile % tile_columns * SIDE_A


@triton.jit
def _words(x, DTYPE: tl.constexpr):
    """Round f32 to a dtype, as integers of its width."""
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
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_A: tl.constexpr,
    COLUMNS_A: tl.constexpr,
    REPEAT: tl.constexpr,
    REPEAT_COLUMNS: tl.constexpr,
    ELEMENT: tl.constexpr,
    RULE: tl.constexpr,
    OUT: tl.constexpr,
    SIDE_A: tl.constexpr,
):
    """Decode a square of the stored matrix `[height, width]`; write it in the weight's
    orientation.
    """
    top, left = _origin(height, width, SIDE_A)
    amax = tl.full((), 1.0, tl.float32)
    if RULE >= TWO_LEVEL:
        amax = tl.load(tl.load(bases + 2).to(tl.pointer_type(tl.float32)))
    scale = decode_scale(
        _stored_scales(
            tl.load(bases + 1),
            top,
            left,
            height,
            width,
            scale_width,
            DOWN,
            ACROSS,
            ROWS_A,
            COLUMNS_A,
            REPEAT,
            REPEAT_COLUMNS,
            RULE,
        ),
        amax,
        RULE,
    )
    packing: tl.constexpr = codes_per_byte(ELEMENT)
    size: tl.constexpr = 4 if OUT == tl.float32 else 2
    source = tl.load(bases) + (top * width + left) // packing
    target = tl.load(bases + 3) + (left * height + top if TRANSPOSED else top * width + left) * size
    aligned = (source % 16 == 0) & (target % 16 == 0) & (width % 32 == 0) & (height % 32 == 0)
    if aligned & (top + SIDE_A <= height) & (left + SIDE_A <= width):
        _square(source, target, height, width, top, left, scale, TRANSPOSED, DOWN, ACROSS, ELEMENT, OUT, SIDE_A, True)
    else:
        _square(source, target, height, width, top, left, scale, TRANSPOSED, DOWN, ACROSS, ELEMENT, OUT, SIDE_A, False)


@triton.jit
def _stored_scales(
    at,
    top,
    left,
    height,
    width,
    scale_width,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS_A: tl.constexpr,
    COLUMNS_A: tl.constexpr,
    REPEAT: tl.constexpr,
    REPEAT_COLUMNS: tl.constexpr,
    RULE: tl.constexpr,
):
    """Return the stored scales of the DOWN x ACROSS blocks of a square; ROWS_A of 0 means one scale
    a tensor.
    """
    i = tl.arange(0, DOWN)[:, None]
    j = tl.arange(0, ACROSS)[None, :]
    exists = (i >= 0) & (j >= 0)
    if ROWS_A:
        i += top // ROWS_A
        j += left // COLUMNS_A
        exists = (i * ROWS_A < height) & (j * COLUMNS_A < width)
    cell = i * REPEAT * scale_width + j * REPEAT_COLUMNS
    if RULE == FP32:
        return load_raw(at, cell, exists, tl.float32, False)
    elif RULE == BF16:
        return load_raw(at, cell, exists, tl.uint16, False).to(tl.int32)
    else:
        return load_raw(at, cell, exists, tl.uint8, False).to(tl.int32)


@triton.jit
def _square(
    source,
    target,
    height,
    width,
    top,
    left,
    scale,
    TRANSPOSED: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    ELEMENT: tl.constexpr,
    OUT: tl.constexpr,
    SIDE_A: tl.constexpr,
    FULL: tl.constexpr,
):
    packing: tl.constexpr = codes_per_byte(ELEMENT)
    bytes_a: tl.constexpr = SIDE_A // packing
    down = tl.arange(0, SIDE_A)[:, None]
    mask = (top + down < height) & (left + packing * tl.arange(0, bytes_a)[None, :] < width)
    i = offsets((width // packing).to(tl.int64), SIDE_A, bytes_a, FULL)
    code = load_raw(source, i, mask, tl.uint8, FULL).to(tl.int32)
    if packing == 2:
        code = tl.reshape(tl.join(code & 0xF, code >> 4), (SIDE_A, SIDE_A))
    value = tl.reshape(decode(code, ELEMENT), (DOWN, SIDE_A // DOWN, ACROSS, SIDE_A // ACROSS))
    words = _words(tl.reshape(value * scale[:, None, :, None], (SIDE_A, SIDE_A)), OUT)
    word: tl.constexpr = tl.int32 if OUT == tl.float32 else tl.int16
    across = tl.arange(0, SIDE_A)[None, :]
    if TRANSPOSED:
        mask = (left + down < width) & (top + across < height)
        store_raw(target, offsets(height.to(tl.int64), SIDE_A, SIDE_A, FULL), tl.trans(words), mask, word, FULL)
    else:
        mask = (top + down < height) & (left + across < width)
        store_raw(target, offsets(width.to(tl.int64), SIDE_A, SIDE_A, FULL), words, mask, word, FULL)
