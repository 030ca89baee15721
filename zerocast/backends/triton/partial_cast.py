"""Stage partial_cast: the codes of the owned elements, written to the half byte."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.triton.amaxes import as_integers, grid_cells, group_amaxes, load_amax
from zerocast.backends.triton.codec import DTYPES, bf16_bits, codes_per_byte, encode, fp16_bits, round_nominal
from zerocast.backends.triton.launch import (
    AMAX,
    COLUMN_AMAX,
    COLUMN_DATA,
    COLUMNS,
    NUMEL,
    ROW_AMAX,
    ROW_DATA,
    SCALE,
    START,
    WIDTH,
    address,
    addresses,
    find,
    launch,
    skip_flag,
    tiling,
)
from zerocast.backends.triton.scales import (
    TWO_LEVEL,
    encode_scale,
    group_constants,
    rule_constants,
    scale_from_amax,
    two_level_global,
)
from zerocast.backends.triton.tiles import (
    Bands,
    Flat,
    TileShape,
    band_tile,
    element,
    is_owned,
    load_f32,
    load_raw,
    offsets,
    owned,
    store_raw,
)
from zerocast.formats import AmaxPolicy, FormatSpec

RUN = 4096
REGISTERS = 64


def partial_cast(
    fmt: FormatSpec,
    nominal: torch.dtype,
    masters: list[Tensor],
    packed: Tensor,
    amaxes: list[Tensor],
    scales: list[Tensor],
    table: Tensor,
    row_data: list[Tensor],
    column_data: list[Tensor],
    skip: Tensor | None,
) -> None:
    """Write the codes of the owned elements, and only those, to the half byte."""
    if not masters:
        return
    device = table.device
    constants: dict[str, Any] = {"DTYPE": DTYPES[masters[0].dtype], "NOMINAL": DTYPES[nominal]}
    shape = TileShape.for_format(fmt) if fmt.block is not None else None
    tiles = tiling(table, Bands(shape.height, shape.width) if shape else Flat(RUN))
    head = addresses(masters, device), table, tiles.firsts, tiles.rows
    data, flag = addresses(row_data, device), skip_flag(skip, device)
    if fmt.element is None:
        launch(_round, tiles.total, device, *head, data, flag, SIZE=RUN, **constants, registers=REGISTERS)
        return
    constants |= rule_constants(fmt) | {"ELEMENT": fmt.element.name}
    words = as_integers(packed)
    if shape:
        constants |= shape.constants() | group_constants(fmt)
        del constants["STEPS"]
        columnwise, tensor_amaxes = addresses(column_data, device), addresses(amaxes, device)
        launch(
            _blocks,
            tiles.total,
            device,
            *head,
            words,
            tensor_amaxes,
            data,
            columnwise,
            flag,
            **constants,
            registers=REGISTERS,
        )
        return
    del constants["RULE"]
    constants["DELAYED"] = fmt.amax_policy is AmaxPolicy.DELAYED
    launch(
        _run,
        tiles.total,
        device,
        *head,
        words,
        addresses(scales, device),
        data,
        flag,
        SIZE=RUN,
        **constants,
        registers=REGISTERS,
    )


@triton.jit
def _run_origin(masters, table, firsts, n, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Return (table row, address of the run's first master element, its index in the weight,
    elements left).
    """
    tile = tl.program_id(0).to(tl.int64)
    weight = find(firsts, n, tile)
    row = table + weight * WIDTH
    first = (tile - tl.load(firsts + weight)) * SIZE
    left = tl.load(row + NUMEL) - first
    first += tl.load(row + START)
    return row, element(masters, row, first, DTYPE), first, left


@triton.jit(do_not_specialize=["n"])
def _round(
    masters,
    table,
    firsts,
    n,
    row_data,
    skip,
    SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    NOMINAL: tl.constexpr,
):
    """Cast to a format without codes: the master rounded to nominal, or its bits if it is nominal
    already.
    """
    if tl.load(skip) != 0:
        return
    row, at, first, left = _run_origin(masters, table, firsts, n, SIZE, DTYPE)
    size: tl.constexpr = 4 if NOMINAL == tl.float32 else 2
    word: tl.constexpr = tl.int32 if NOMINAL == tl.float32 else tl.int16
    i = tl.arange(0, SIZE)
    mask = i < left
    out = address(row_data, row, ROW_DATA, 1) + first * size
    if (left >= SIZE) & (at % 16 == 0) & (out % 16 == 0):
        bits = _words(at, i, mask, word, DTYPE, NOMINAL, True)
        store_raw(out, i, bits, mask, word, True)
    else:
        bits = _words(at, i, mask, word, DTYPE, NOMINAL, False)
        if out % size == 0:
            store_raw(out, i, bits, mask, word, False)
        else:
            for byte in tl.static_range(size):
                store_raw(out + byte, i * size, (bits >> (8 * byte)).to(tl.uint8), mask, tl.uint8, False)


@triton.jit
def _words(at, i, mask, WORD: tl.constexpr, DTYPE: tl.constexpr, NOMINAL: tl.constexpr, FULL: tl.constexpr):
    if DTYPE == NOMINAL:
        return load_raw(at, i, mask, WORD, FULL)
    elif NOMINAL == tl.bfloat16:
        return (bf16_bits(load_f32(at, i, mask, DTYPE, FULL)) >> 16).to(tl.int16)
    else:
        return fp16_bits(load_f32(at, i, mask, DTYPE, FULL)).to(tl.int16)


@triton.jit(do_not_specialize=["n"])
def _run(
    masters,
    table,
    firsts,
    n,
    packed,
    scales,
    row_data,
    skip,
    SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    NOMINAL: tl.constexpr,
    ELEMENT: tl.constexpr,
    DELAYED: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """Encode a run of elements with one scale for the tensor."""
    if tl.load(skip) != 0:
        return
    row, at, first, left = _run_origin(masters, table, firsts, n, SIZE, DTYPE)
    if DELAYED:
        scale = tl.load(address(scales, row, SCALE, 4).to(tl.pointer_type(tl.float32)))
    else:
        scale = scale_from_amax(load_amax(packed, tl.load(row + ROW_AMAX), True), LARGEST, POWER_OF_2, EPSILON)
    i = tl.arange(0, SIZE)
    mask = i < left
    out = address(row_data, row, ROW_DATA, 1) + first
    if (left >= SIZE) & (at % 16 == 0) & (out % 16 == 0):
        x = round_nominal(load_f32(at, i, mask, DTYPE, True), NOMINAL)
        codes = encode(x * scale, ELEMENT).to(tl.uint8)
        store_raw(out, i, codes, mask, tl.uint8, True)
    else:
        x = round_nominal(load_f32(at, i, mask, DTYPE, False), NOMINAL)
        codes = encode(x * scale, ELEMENT).to(tl.uint8)
        store_raw(out, i, codes, mask, tl.uint8, False)


@triton.jit(do_not_specialize=["n"])
def _blocks(
    masters,
    table,
    firsts,
    n,
    packed,
    amaxes,
    row_data,
    column_data,
    skip,
    HEIGHT: tl.constexpr,
    WIDTH_A: tl.constexpr,
    ROWS_A: tl.constexpr,
    COLUMNS_A: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    OWN_COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    NOMINAL: tl.constexpr,
    ELEMENT: tl.constexpr,
    RULE: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EPSILON: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    ROUNDS_DOWN: tl.constexpr,
):
    """Encode a tile with one scale for each block, rowwise and in a separate columnwise grid."""
    if tl.load(skip) != 0:
        return
    tile = tl.program_id(0).to(tl.int64)
    weight = find(firsts, n, tile)
    row = table + weight * WIDTH
    top, left = band_tile(row, tile - tl.load(firsts + weight), HEIGHT, WIDTH_A)
    columns = tl.load(row + COLUMNS)
    first = top * columns + left
    s_enc = tl.full((), 1.0, tl.float32)
    if RULE >= TWO_LEVEL:
        s_enc = two_level_global(tl.load(address(amaxes, row, AMAX, 4).to(tl.pointer_type(tl.float32))))
    at = element(masters, row, first, DTYPE)
    out = code_address(row_data, row, ROW_DATA, first, ELEMENT)
    full = is_owned(row, top, left, HEIGHT, WIDTH_A) & (at % 16 == 0) & (out % 16 == 0) & (columns % 32 == 0)
    scale = tile_scales(
        packed, row, ROW_AMAX, top, left, s_enc, HEIGHT, WIDTH_A, ROWS_A, COLUMNS_A,
        RULE, LARGEST, POWER_OF_2, EPSILON, GROUP_ROWS, GROUP_COLUMNS, ROUNDS_DOWN,
    )  # fmt: skip
    if OWN_ROWS:
        own_out = code_address(column_data, row, COLUMN_DATA, first, ELEMENT)
        full = full & (own_out % 16 == 0)
        own_scale = tile_scales(
            packed, row, COLUMN_AMAX, top, left, s_enc,
            HEIGHT, WIDTH_A, OWN_ROWS, OWN_COLUMNS, RULE, LARGEST, POWER_OF_2, EPSILON, 0, 0, ROUNDS_DOWN,
        )  # fmt: skip
    if full:
        i = offsets(columns, HEIGHT, WIDTH_A, True)
        x = round_nominal(load_f32(at, i, True, DTYPE, True), NOMINAL)
        codes = tile_codes(x, scale, HEIGHT, WIDTH_A, ELEMENT)
        store_codes(out, columns, row, top, left, codes, HEIGHT, WIDTH_A, ELEMENT, True)
        if OWN_ROWS:
            codes = tile_codes(x, own_scale, HEIGHT, WIDTH_A, ELEMENT)
            store_codes(own_out, columns, row, top, left, codes, HEIGHT, WIDTH_A, ELEMENT, True)
    else:
        i = offsets(columns, HEIGHT, WIDTH_A, False)
        mask = owned(row, top, left, HEIGHT, WIDTH_A)
        x = round_nominal(load_f32(at, i, mask, DTYPE, False), NOMINAL)
        codes = tile_codes(x, scale, HEIGHT, WIDTH_A, ELEMENT)
        store_codes(out, columns, row, top, left, codes, HEIGHT, WIDTH_A, ELEMENT, False)
        if OWN_ROWS:
            codes = tile_codes(x, own_scale, HEIGHT, WIDTH_A, ELEMENT)
            store_codes(own_out, columns, row, top, left, codes, HEIGHT, WIDTH_A, ELEMENT, False)


# A tile of codes: the scales of its blocks, its encoding and its stores, to the half byte.


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
