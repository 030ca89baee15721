"""Stage upcast: E2M1 codes become E4M3 codes of the same values, for a weight or for its transpose,
with one f32 scale a scale group (E8M0 scales) or one of the tensor (exact E4M3 scales).
"""

import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.triton.codec import as_f32, decode, decode_e8m0, encode
from zerocast.backends.triton.launch import addresses, launch
from zerocast.backends.triton.scales import ONE_2688TH
from zerocast.backends.triton.tiles import load_raw, offsets, store_raw
from zerocast.formats import FormatSpec
from zerocast.formats import spec as formats

# The extent of a program's tiles if the tensor has one scale.
SIDE = 128
UPCAST_EXPONENT = tl.constexpr(formats.UPCAST_EXPONENT)


def upcast(
    fmt: FormatSpec,
    data: Tensor,
    scale_inv: Tensor,
    amax: Tensor | None,
    rows: int,
    columns: int,
    transposed: bool,
    codes: Tensor,
    group_scale_inv: Tensor,
) -> None:
    """Write E4M3 codes and their scales; a program takes a group."""
    assert fmt.block
    height, width = fmt.scale_group or (SIDE, SIDE)
    programs = -(-rows // height) * -(-columns // width)
    bases = addresses((data, scale_inv, codes, group_scale_inv, data if amax is None else amax), data.device)
    sizes = rows, columns, scale_inv.shape[-1], group_scale_inv.shape[-1]
    launch(
        _upcast,
        programs,
        data.device,
        bases,
        *sizes,
        TRANSPOSED=transposed,
        HEIGHT=height,
        WIDTH_A=width,
        ROWS_A=fmt.block[0],
        COLUMNS_A=fmt.block[1],
        EXACT_SCALES=fmt.exact_scales,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["rows", "columns", "scale_width", "group_scale_width"])
def _upcast(
    bases,
    rows,
    columns,
    scale_width,
    group_scale_width,
    TRANSPOSED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH_A: tl.constexpr,
    ROWS_A: tl.constexpr,
    COLUMNS_A: tl.constexpr,
    EXACT_SCALES: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    groups_across = (columns + WIDTH_A - 1) // WIDTH_A
    down = group // groups_across
    across = group % groups_across
    top = down * HEIGHT
    left = across * WIDTH_A
    tiles_down: tl.constexpr = HEIGHT // ROWS_A
    tiles_across: tl.constexpr = WIDTH_A // COLUMNS_A
    # Beyond the weight the scale buffer has zeros, the smallest scale.
    i = (top + tl.arange(0, tiles_down)[:, None] * ROWS_A) * scale_width
    j = across * tiles_across + tl.arange(0, tiles_across)[None, :]
    at = tl.load(bases + 1).to(tl.pointer_type(tl.uint8)) + i + j
    stored = tl.load(at, mask=j < scale_width, other=0).to(tl.int32)
    if EXACT_SCALES:
        factor = decode(stored, "e4m3") * 0.125
        if group == 0:
            amax = tl.load(tl.load(bases + 4).to(tl.pointer_type(tl.float32)))
            tl.store(tl.load(bases + 3).to(tl.pointer_type(tl.float32)), 8.0 * (amax * ONE_2688TH))
    else:
        largest = tl.max(tl.max(stored, axis=1), axis=0)
        _store_scales(
            tl.load(bases + 3), largest, down, across, rows, columns, group_scale_width, TRANSPOSED, HEIGHT, WIDTH_A
        )
        factor = decode_e8m0(tl.maximum(stored - largest + (127 + UPCAST_EXPONENT), 0))
    source = tl.load(bases) + (top * columns + left) // 2
    target = tl.load(bases + 2) + (left * rows + top if TRANSPOSED else top * columns + left)
    whole = (top + HEIGHT <= rows) & (left + WIDTH_A <= columns)
    # The columns of nvfp4 are multiples of 16, and two codes are a byte.
    if whole & (source % 16 == 0) & (target % 16 == 0) & (columns % 32 == 0):
        _group(source, target, rows, columns, top, left, factor, TRANSPOSED, HEIGHT, WIDTH_A, ROWS_A, COLUMNS_A, True)
    else:
        _group(source, target, rows, columns, top, left, factor, TRANSPOSED, HEIGHT, WIDTH_A, ROWS_A, COLUMNS_A, False)


@triton.jit
def _store_scales(
    at,
    largest,
    down,
    across,
    rows,
    columns,
    width,
    TRANSPOSED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH_A: tl.constexpr,
):
    """Store the scale of a group, and behind the last one of a row the padding, which is 1."""
    row, column = down, across
    last = (columns + WIDTH_A - 1) // WIDTH_A - 1
    if TRANSPOSED:
        row, column = across, down
        last = (rows + HEIGHT - 1) // HEIGHT - 1
    k = tl.arange(0, 4)
    bits = decode_e8m0(largest) * as_f32(largest * 0 + ((127 - UPCAST_EXPONENT) << 23))
    # A comparison of scalars is no mask: the interpreter of Triton 3.9 makes integers of it.
    end = tl.where(column == last, width, 0)
    mask = (k == 0) | (column + k < end)
    tl.store(at.to(tl.pointer_type(tl.float32)) + row * width + column + k, tl.where(k == 0, bits, 1.0), mask=mask)


@triton.jit
def _group(
    source,
    target,
    rows,
    columns,
    top,
    left,
    factor,
    TRANSPOSED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH_A: tl.constexpr,
    ROWS_A: tl.constexpr,
    COLUMNS_A: tl.constexpr,
    FULL: tl.constexpr,
):
    down = tl.arange(0, HEIGHT)[:, None]
    mask = (top + down < rows) & (left + 2 * tl.arange(0, WIDTH_A // 2)[None, :] < columns)
    i = offsets((columns // 2).to(tl.int64), HEIGHT, WIDTH_A // 2, FULL)
    packed = load_raw(source, i, mask, tl.uint8, FULL).to(tl.int32)
    value = decode(tl.join(packed & 0xF, packed >> 4), "e2m1")
    tiles = tl.reshape(value, (HEIGHT // ROWS_A, ROWS_A, WIDTH_A // COLUMNS_A, COLUMNS_A))
    fp8 = encode(tl.reshape(tiles * factor[:, None, :, None], (HEIGHT, WIDTH_A)), "e4m3").to(tl.uint8)
    if TRANSPOSED:
        mask = (left + tl.arange(0, WIDTH_A)[:, None] < columns) & (top + tl.arange(0, HEIGHT)[None, :] < rows)
        store_raw(target, offsets(rows.to(tl.int64), WIDTH_A, HEIGHT, FULL), tl.trans(fp8), mask, tl.uint8, FULL)
    else:
        mask = (top + down < rows) & (left + tl.arange(0, WIDTH_A)[None, :] < columns)
        store_raw(target, offsets(columns.to(tl.int64), HEIGHT, WIDTH_A, FULL), fp8, mask, tl.uint8, FULL)
