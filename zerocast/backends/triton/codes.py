"""A tile of codes: the scales of its blocks, its encoding and its stores, to the half byte."""

import triton
import triton.language as tl

from zerocast.backends.triton.amaxes import grid_cells, group_amaxes, load_amax
from zerocast.backends.triton.codec import codes_per_byte, encode
from zerocast.backends.triton.launch import address
from zerocast.backends.triton.scales import encode_scale
from zerocast.backends.triton.tiles import load_raw, offsets, owned, store_raw


@triton.jit
def code_address(bases, row, BASE: tl.constexpr, first, ELEMENT: tl.constexpr):
    """Return the address of the byte with the code of element `first`, which is even for 4-bit
    codes.
    """
    return address(bases, row, BASE, 1) + first // codes_per_byte(ELEMENT)


@triton.jit
def tile_scales(
    packed,
    row,
    PLACE: tl.constexpr,
    top,
    left,
    s_enc,
    HEIGHT: tl.constexpr,
    WIDTH_A: tl.constexpr,
    ROWS_A: tl.constexpr,
    COLUMNS_A: tl.constexpr,
    RULE: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EPSILON: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    ROUNDS_DOWN: tl.constexpr,
):
    """Encode scales `[block_rows, block_columns]` of the blocks of a tile; a block may be higher
    than the tile.
    """
    block_rows: tl.constexpr = HEIGHT // ROWS_A if HEIGHT > ROWS_A else 1
    cell, exists = grid_cells(row, top, left, ROWS_A, COLUMNS_A, block_rows, WIDTH_A // COLUMNS_A)
    amax = load_amax(packed, tl.load(row + PLACE) + cell, exists)
    group = amax
    if GROUP_ROWS:
        block_columns: tl.constexpr = WIDTH_A // COLUMNS_A
        group = group_amaxes(
            packed, row, PLACE, top, left, ROWS_A, COLUMNS_A, block_columns, GROUP_ROWS, GROUP_COLUMNS
        )  # fmt: skip
    return encode_scale(amax, group, s_enc, RULE, LARGEST, POWER_OF_2, EPSILON, GROUP_ROWS > 0, ROUNDS_DOWN)


@triton.jit
def tile_codes(x, scale, HEIGHT: tl.constexpr, WIDTH_A: tl.constexpr, ELEMENT: tl.constexpr):
    """Return the codes of a tile as int32 `[HEIGHT, WIDTH_A]`; `scale [block_rows, block_columns]`
    is broadcast over blocks.
    """
    block_rows: tl.constexpr = scale.shape[0]
    block_columns: tl.constexpr = scale.shape[1]
    blocks = tl.reshape(x, (block_rows, HEIGHT // block_rows, block_columns, WIDTH_A // block_columns))
    return tl.reshape(encode(blocks * scale[:, None, :, None], ELEMENT), (HEIGHT, WIDTH_A))


@triton.jit
def store_codes(
    out,
    columns,
    row,
    top,
    left,
    codes,
    HEIGHT: tl.constexpr,
    WIDTH_A: tl.constexpr,
    ELEMENT: tl.constexpr,
    FULL: tl.constexpr,
):
    """Store the owned codes of a tile.

    A byte with one owned code keeps its other half, which is read and written back. That half
    belongs to another rank and never to another program.
    """
    if codes_per_byte(ELEMENT) == 1:
        i = offsets(columns, HEIGHT, WIDTH_A, FULL)
        mask = owned(row, top, left, HEIGHT, WIDTH_A)
        store_raw(out, i, codes.to(tl.uint8), mask, tl.uint8, FULL)
    else:
        half: tl.constexpr = WIDTH_A // 2
        i = offsets(columns // 2, HEIGHT, half, FULL)
        low, high = tl.split(tl.reshape(codes, (HEIGHT, half, 2)))
        data = low | (high << 4)
        if FULL:
            store_raw(out, i, data.to(tl.uint8), True, tl.uint8, True)
        else:
            mask = owned(row, top, left, HEIGHT, WIDTH_A).to(tl.int32)
            has_low, has_high = tl.split(tl.reshape(mask, (HEIGHT, half, 2)))
            kept = load_raw(out, i, has_low != has_high, tl.uint8, False).to(tl.int32)
            data = tl.where(has_low > 0, data & 0xF, kept & 0xF) | tl.where(has_high > 0, data & 0xF0, kept & 0xF0)
            touched = (has_low | has_high) > 0
            store_raw(out, i, data.to(tl.uint8), touched, tl.uint8, False)
