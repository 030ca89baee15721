"""Stage adam_8bit: AdamW on pieces of weights whose moments are kept in 8 bits
(docs/formats/moments_8bit.md), and the partial amaxes of the updated masters.

A program processes some groups of one piece, one per row of a tile: consecutive groups, or for
formats with blocks the groups of complete blocks below each other. Values of codes are read from
the reference's tables, so that they are equal to the bit. A code is guessed by a formula that errs
by one at most, and then decided by comparisons with the values of codes, as docs/formats says.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.descriptor import Piece
from zerocast.backends.reference.adam import first_values, second_values
from zerocast.backends.triton.adam_amax import adamw
from zerocast.backends.triton.amaxes import amax_bits, as_integers, max_into, note_not_finite
from zerocast.backends.triton.codec import DTYPES, INF, as_f32, magnitude, round_nominal
from zerocast.backends.triton.launch import COLUMNS, ROW_AMAX, START, WIDTH, addresses, find, launch, skip_flag, tiling
from zerocast.backends.triton.partial_amax import store_amaxes
from zerocast.backends.triton.tiles import (
    Bands,
    TileShape,
    band_tile,
    is_owned,
    load_f32,
    load_raw,
    owned,
    store_f32,
    store_raw,
)
from zerocast.formats import FormatSpec
from zerocast.formats.layout import MOMENT_GROUP, moment_groups

GROUPS = 16
REGISTERS = 128

GROUP = tl.constexpr(MOMENT_GROUP)
PIECE_WIDTH = tl.constexpr(len(Piece))
BASE = tl.constexpr(int(Piece.BASE))
OFFSET = tl.constexpr(int(Piece.OFFSET))
PIECE_NUMEL = tl.constexpr(int(Piece.NUMEL))
SCALARS = tl.constexpr(int(Piece.SCALARS))
PIECE_START = tl.constexpr(int(Piece.START))
PIECE_COLUMNS = tl.constexpr(int(Piece.COLUMNS))
SCALE = tl.constexpr(int(Piece.SCALE))
SECOND_SCALE = tl.constexpr(int(Piece.SECOND_SCALE))
CUT_FIRST = tl.constexpr(int(Piece.CUT_FIRST))
CUT_LAST = tl.constexpr(int(Piece.CUT_LAST))
KEY = tl.constexpr(int(Piece.KEY))
# Tensors of one base: masters, gradients, both moments, and scales.
TENSORS = tl.constexpr(5)
# 2**-100 and the largest finite f32, as bits.
SMALLEST_SCALE = tl.constexpr(27 << 23)
LARGEST_SCALE = tl.constexpr(0x7F7FFFFF)


@dataclass(frozen=True)
class PieceGroups:
    """Splits the groups of pieces into runs of `size`."""

    size: int

    def count(self, row: list[int]) -> int:
        """Return the number of runs of one piece."""
        return -(-moment_groups(row[Piece.START], row[Piece.NUMEL], row[Piece.COLUMNS]) // self.size)


@dataclass(frozen=True)
class CutPieces:
    """One tile for each piece that has a part of a cut group."""

    def count(self, row: list[int]) -> int:
        """Return the number of tiles of one piece."""
        return int(max(row[Piece.CUT_FIRST], row[Piece.CUT_LAST]) >= 0)


def _tile(fmt: FormatSpec) -> TileShape:
    """Return tiles that are one group wide, as many per program as complete blocks need."""
    assert fmt.block
    height = fmt.columnwise_block[0] if fmt.columnwise_block else GROUPS
    return TileShape(fmt, height, MOMENT_GROUP, max(1, fmt.block[0] // height))


def adam_8bit(
    fmt: FormatSpec,
    nominal: torch.dtype,
    masters: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    moment_scales: list[Tensor],
    table: Tensor,
    pieces: Tensor,
    scalars: Tensor,
    clip: Tensor,
    steps: Tensor,
    packed: Tensor,
    cut_largest: Tensor,
    finishes: bool,
    skip: Tensor | None,
) -> None:
    """Run Adam over the pieces of flat shards, keep their moments in 8 bits, and take the partial
    amaxes.
    """
    if not masters:
        return
    device = table.device
    # The tensors of one base are consecutive.
    by_base = zip(masters, grads, exp_avgs, exp_avg_sqs, moment_scales, strict=True)
    bases = addresses(list(itertools.chain.from_iterable(by_base)), device)
    of_step = scalars, clip, steps, skip_flag(skip, device)
    tail = cut_largest, cut_largest.shape[1], *_values(device), *of_step
    constants = {"GRAD": DTYPES[grads[0].dtype], "registers": REGISTERS}
    if finishes:
        tiles = tiling(pieces, CutPieces())
        launch(_cut_groups, tiles.total, device, bases, pieces, tiles.firsts, tiles.rows, *tail, **constants)
        return
    amaxes, nominals = as_integers(packed), {"NOMINAL": DTYPES[nominal]}
    if fmt.block:
        shape = _tile(fmt)
        tiles = tiling(table, Bands(shape.band, shape.width))
        head = bases, pieces, table, tiles.firsts, tiles.rows, amaxes
        launch(_blocks, tiles.total, device, *head, *tail, **shape.constants(), **nominals, **constants)
        return
    tiles = tiling(pieces, PieceGroups(GROUPS))
    head = bases, pieces, table, tiles.firsts, tiles.rows, amaxes
    launch(_groups, tiles.total, device, *head, *tail, COUNT=GROUPS, **nominals, **constants)


@functools.cache
def _values(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the values of the codes of both moments, in units of the scale."""
    return first_values(device), second_values(device)


@triton.jit
def _extent(row):
    """Return (groups of the weight before the first one of a piece, groups of the piece)."""
    start = tl.load(row + PIECE_START)
    before = _group_of(row, start)
    return before, _group_of(row, start + tl.load(row + PIECE_NUMEL) - 1) + 1 - before


@triton.jit
def _group_of(row, element):
    """Return the number of the group of an element, counted over the rows of its weight."""
    columns = tl.load(row + PIECE_COLUMNS)
    return element // columns * ((columns - 1) // GROUP + 1) + element % columns // GROUP


@triton.jit
def _mix(x):
    """Return the finalizer of MurmurHash3 on u32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _random_numbers(key, step, element):
    """Return the random numbers of elements of a weight, f32."""
    of_step = _mix(key.to(tl.uint32) + step.to(tl.uint32) * 0x9E3779B9)
    bits = _mix(_mix(of_step + (element >> 32).to(tl.uint32)) + element.to(tl.uint32))
    return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _largest(x):
    """Return the largest positive number of each row as bits, 0 without one. NaN is ignored."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.max(tl.where(bits > INF, 0, tl.maximum(bits, 0)), 1)


@triton.jit
def _scale(largest):
    """Return the scales of groups from their largest values, as bits."""
    scale = tl.minimum(tl.maximum(largest, SMALLEST_SCALE), LARGEST_SCALE)
    return as_f32(tl.where(largest > 0, scale, 0))


@triton.jit
def _at_most(x, scale):
    """Return the values between 0 and a scale; 0 for NaN."""
    positive = tl.where(x > 0, x, 0.0)
    return tl.where(positive < scale, positive, scale)


@triton.jit
def _decide(code, size, scale, values, LAST: tl.constexpr):
    """Return (the largest code whose value is at most `size`, that value, the value of the next
    code), of a guess that errs by one at most.
    """
    code = tl.minimum(tl.maximum(code, 0), LAST)
    code -= (tl.load(values + code) * scale > size).to(tl.int32)
    following = tl.load(values + tl.minimum(code + 1, LAST)) * scale
    code += ((code < LAST) & (following <= size)).to(tl.int32)
    return code, tl.load(values + code) * scale, tl.load(values + tl.minimum(code + 1, LAST)) * scale


@triton.jit
def _encode_first(m, scale, values):
    """Return the codes of first moments as int32, rounded to nearest by positive scales."""
    size = _at_most(tl.abs(m), scale)
    ratio = tl.div_rn(size, scale)
    guess = tl.div_rn(254.0 * ratio, 1.0 + ratio).to(tl.int32)
    code, low, high = _decide(guess, size, scale, values, 127)
    code += (size - low > high - size).to(tl.int32)
    return tl.where(m < 0, -code, code)


@triton.jit
def _encode_second(v, scale, random, values):
    """Return the codes of second moments as int32, rounded at random by positive scales."""
    size = _at_most(v, scale)
    guess = (259.0 * tl.sqrt_rn(tl.sqrt_rn(tl.div_rn(size, scale))) - 4.0).to(tl.int32)
    code, low, high = _decide(guess, size, scale, values, 255)
    root = tl.sqrt_rn(low)
    code += (tl.sqrt_rn(size) - root > random * (tl.sqrt_rn(high) - root)).to(tl.int32)
    return tl.where(size > 0, tl.maximum(code, 1), 0)


@triton.jit
def _elements(row, group, has_group, COUNT: tl.constexpr, FULL: tl.constexpr):
    """Return (an element of the weight, the distances `[COUNT, GROUP]` of the groups' elements from
    it, the mask of those that the piece has).
    """
    start = tl.load(row + PIECE_START)
    before, _ = _extent(row)
    slot = tl.arange(0, GROUP)[None, :]
    if FULL:
        # The groups follow each other, and the piece has all of them.
        i = tl.arange(0, COUNT)[:, None] * GROUP + slot
        return (before + tl.min(group, 0)) * GROUP, i, i >= 0
    else:
        columns = tl.load(row + PIECE_COLUMNS)
        groups_per_row = (columns - 1) // GROUP + 1
        number = before + group[:, None]
        column = number % groups_per_row * GROUP + slot
        i = number // groups_per_row * columns + column - start
        return start, i, has_group[:, None] & (column < columns) & (i >= 0) & (i < tl.load(row + PIECE_NUMEL))


@triton.jit
def _cut_places(row, group, has_group):
    """Return the indices of groups among the shared ones, or -1. A piece of one group has it in
    either column.
    """
    _, count = _extent(row)
    first = tl.load(row + CUT_FIRST)
    last = tl.where(group == count - 1, tl.load(row + CUT_LAST), -1)
    return tl.where(has_group, tl.where((group == 0) & (first >= 0), first, last), -1)


@triton.jit
def _old_moments(m_at, v_at, i, mask, m_scale, v_scale, first_table, second_table, FULL: tl.constexpr):
    """Return both moments as they were kept, f32."""
    m_code = load_raw(m_at, i, mask, tl.int8, FULL).to(tl.int32)
    v_code = load_raw(v_at, i, mask, tl.uint8, FULL).to(tl.int32)
    m = tl.load(first_table + tl.abs(m_code)) * m_scale
    return tl.where(m_code < 0, -m, m), tl.load(second_table + v_code) * v_scale


@triton.jit
def _codes(m, v, m_scale, v_scale, random, first_table, second_table):
    """Return the codes of both moments. Groups of zeros have codes 0."""
    # Nothing is divided by a scale of 0.
    m_code = _encode_first(m, tl.where(m_scale > 0, m_scale, 1.0), first_table)
    v_code = _encode_second(v, tl.where(v_scale > 0, v_scale, 1.0), random, second_table)
    return tl.where(m_scale > 0, m_code, 0).to(tl.int8), tl.where(v_scale > 0, v_code, 0).to(tl.uint8)


@triton.jit
def _update(
    bases,
    row,
    group,
    has_group,
    first,
    i,
    mask,
    cut_largest,
    cut_count,
    first_table,
    second_table,
    scalars,
    clip,
    steps,
    GRAD: tl.constexpr,
    FULL: tl.constexpr,
    FINISHES: tl.constexpr,
):
    """Update groups `[COUNT]` of a piece, whose elements `[COUNT, GROUP]` begin `i` behind the
    weight's element `first`, or finish them. Returns the masters, undefined where masked.
    """
    at = tl.load(row + OFFSET) - tl.load(row + PIECE_START) + first
    p_at = tl.load(bases) + at * 4
    g_at = tl.load(bases + 1) + at * (4 if GRAD == tl.float32 else 2)
    m_at = tl.load(bases + 2) + at
    v_at = tl.load(bases + 3) + at
    scales_at = tl.load(bases + 4)
    m_scale_at = scales_at + tl.load(row + SCALE) * 4
    v_scale_at = scales_at + tl.load(row + SECOND_SCALE) * 4
    m_scale = load_f32(m_scale_at, group, has_group, tl.float32, False)[:, None]
    v_scale = load_f32(v_scale_at, group, has_group, tl.float32, False)[:, None]
    m, v = _old_moments(m_at, v_at, i, mask, m_scale, v_scale, first_table, second_table, FULL)
    p = load_f32(p_at, i, mask, tl.float32, FULL)
    g = load_f32(g_at, i, mask, GRAD, FULL)
    p, m, v = adamw(p, g, m, v, scalars + tl.load(row + SCALARS) * 8, clip)

    cut = _cut_places(row, group, has_group)
    if FINISHES:
        written = cut >= 0
        m_largest = tl.load(cut_largest + cut, mask=written, other=0).to(tl.int32, bitcast=True)
        v_largest = tl.load(cut_largest + cut_count + cut, mask=written, other=0).to(tl.int32, bitcast=True)
    else:
        written = has_group & (cut < 0)
        store_f32(p_at, i, p, mask, tl.float32, FULL)
        m_largest = _largest(tl.where(mask, as_f32(magnitude(m)), 0.0))
        v_largest = _largest(tl.where(mask, v, 0.0))
        tl.store(cut_largest + cut, as_f32(m_largest), mask=cut >= 0)
        tl.store(cut_largest + cut_count + cut, as_f32(v_largest), mask=cut >= 0)
    m_scale = _scale(m_largest)
    v_scale = _scale(v_largest)
    store_f32(m_scale_at, group, m_scale, written, tl.float32, False)
    store_f32(v_scale_at, group, v_scale, written, tl.float32, False)
    random = _random_numbers(tl.load(row + KEY), tl.load(steps + tl.load(row + SCALARS)), first + i)
    m_code, v_code = _codes(m, v, m_scale[:, None], v_scale[:, None], random, first_table, second_table)
    store_raw(m_at, i, m_code, mask & written[:, None], tl.int8, FULL)
    store_raw(v_at, i, v_code, mask & written[:, None], tl.uint8, FULL)
    return p


@triton.jit
def _addresses(bases, at, GRAD: tl.constexpr):
    """Return the addresses of an element in the four flat tensors as one number, which is a
    multiple of 16 if each of them is.
    """
    g_at = tl.load(bases + 1) + at * (4 if GRAD == tl.float32 else 2)
    return (tl.load(bases) + at * 4) | g_at | (tl.load(bases + 2) + at) | (tl.load(bases + 3) + at)


@triton.jit(do_not_specialize=["n", "cut_count"])
def _groups(
    bases,
    pieces,
    table,
    firsts,
    n,
    packed,
    cut_largest,
    cut_count,
    first_table,
    second_table,
    scalars,
    clip,
    steps,
    skip,
    COUNT: tl.constexpr,
    NOMINAL: tl.constexpr,
    GRAD: tl.constexpr,
):
    """Update a run of groups of a format without blocks. Shared groups keep their codes, and their
    largest values are entered.
    """
    if tl.load(skip) != 0:
        return
    tile = tl.program_id(0).to(tl.int64)
    piece = find(firsts, n, tile)
    row = pieces + piece * PIECE_WIDTH
    bases += tl.load(row + BASE) * TENSORS
    _, count = _extent(row)
    begin = (tile - tl.load(firsts + piece)) * COUNT
    group = begin + tl.arange(0, COUNT)
    has_group = group < count
    is_aligned = _addresses(bases, tl.load(row + OFFSET) + begin * GROUP, GRAD) % 16 == 0
    # Contiguous groups of the same size, none of which can be shared.
    whole = (tl.load(row + PIECE_COLUMNS) % GROUP == 0) & (tl.load(row + PIECE_START) % GROUP == 0)
    if is_aligned & whole & ((begin + COUNT) * GROUP <= tl.load(row + PIECE_NUMEL)):
        bits, worst = _update_run(
            bases, row, group, has_group, cut_largest, cut_count,
            first_table, second_table, scalars, clip, steps, COUNT, NOMINAL, GRAD, True,
        )  # fmt: skip
    else:
        bits, worst = _update_run(
            bases, row, group, has_group, cut_largest, cut_count,
            first_table, second_table, scalars, clip, steps, COUNT, NOMINAL, GRAD, False,
        )  # fmt: skip
    of_table = table + piece * WIDTH
    max_into(packed, tl.load(of_table + ROW_AMAX), bits)
    note_not_finite(packed, of_table, worst)


@triton.jit
def _update_run(
    bases,
    row,
    group,
    has_group,
    cut_largest,
    cut_count,
    first_table,
    second_table,
    scalars,
    clip,
    steps,
    COUNT: tl.constexpr,
    NOMINAL: tl.constexpr,
    GRAD: tl.constexpr,
    FULL: tl.constexpr,
):
    """Update groups `[COUNT]` of a piece; returns (their largest |x| as bits, the same with NaN
    above Inf).
    """
    first, i, mask = _elements(row, group, has_group, COUNT, FULL)
    p = _update(
        bases, row, group, has_group, first, i, mask, cut_largest, cut_count,
        first_table, second_table, scalars, clip, steps, GRAD, FULL, False,
    )  # fmt: skip
    bits, worst = _magnitudes(p, mask, NOMINAL)
    return tl.max(tl.max(bits, 1), 0), tl.max(tl.max(worst, 1), 0)


@triton.jit
def _magnitudes(p, mask, NOMINAL: tl.constexpr):
    """Return (the bits of |p| in the nominal dtype, 0 for NaN; the bits of |p|, NaN above Inf), 0
    where masked.
    """
    return tl.where(mask, amax_bits(round_nominal(p, NOMINAL)), 0), tl.where(mask, magnitude(p), 0)


@triton.jit
def _update_band(
    bases,
    row,
    of_table,
    top,
    left,
    cut_largest,
    cut_count,
    first_table,
    second_table,
    scalars,
    clip,
    steps,
    HEIGHT: tl.constexpr,
    STEPS: tl.constexpr,
    NOMINAL: tl.constexpr,
    GRAD: tl.constexpr,
    FULL: tl.constexpr,
):
    """Update the groups at column `left` of STEPS tiles of HEIGHT rows; returns (their elementwise
    largest |x| as bits `[HEIGHT, GROUP]`, the largest of all with NaN above Inf).
    """
    columns = tl.load(of_table + COLUMNS)
    if FULL:
        columns = columns // GROUP * GROUP
    before, _ = _extent(row)
    # The rows of the weight above the rows of the table.
    above = (tl.load(row + PIECE_START) - tl.load(of_table + START)) // columns
    groups_per_row = (columns + GROUP - 1) // GROUP
    i = tl.arange(0, HEIGHT)[:, None] * columns + tl.arange(0, GROUP)[None, :]
    largest, worst = tl.zeros((HEIGHT, GROUP), tl.int32), tl.zeros((HEIGHT, GROUP), tl.int32)
    for tile in range(STEPS):
        line = top + tile * HEIGHT
        mask = owned(of_table, line, left, HEIGHT, GROUP)
        has_group = tl.max(mask.to(tl.int32), 1) > 0
        group = (above + line + tl.arange(0, HEIGHT)) * groups_per_row + left // GROUP - before
        p = _update(
            bases, row, group, has_group, (above + line) * columns + left, i, mask,
            cut_largest, cut_count, first_table, second_table, scalars, clip, steps, GRAD, FULL, False,
        )  # fmt: skip
        bits, of_tile = _magnitudes(p, mask, NOMINAL)
        largest, worst = tl.maximum(largest, bits), tl.maximum(worst, of_tile)
    return largest, tl.max(tl.max(worst, 1), 0)


@triton.jit(do_not_specialize=["n", "cut_count"])
def _blocks(
    bases,
    pieces,
    table,
    firsts,
    n,
    packed,
    cut_largest,
    cut_count,
    first_table,
    second_table,
    scalars,
    clip,
    steps,
    skip,
    HEIGHT: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH_A: tl.constexpr,
    ROWS_A: tl.constexpr,
    COLUMNS_A: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    OWN_COLUMNS: tl.constexpr,
    NOMINAL: tl.constexpr,
    GRAD: tl.constexpr,
):
    """Update a band of full block rows, one group wide, with one amax for each block."""
    if tl.load(skip) != 0:
        return
    tile = tl.program_id(0).to(tl.int64)
    piece = find(firsts, n, tile)
    row = pieces + piece * PIECE_WIDTH
    bases += tl.load(row + BASE) * TENSORS
    of_table = table + piece * WIDTH
    top, left = band_tile(of_table, tile - tl.load(firsts + piece), HEIGHT * STEPS, WIDTH_A)
    columns = tl.load(of_table + COLUMNS)
    at = tl.load(row + OFFSET) + top * columns + left - tl.load(of_table + START)
    is_aligned = (_addresses(bases, at, GRAD) % 16 == 0) & (columns % GROUP == 0)
    if is_owned(of_table, top, left, HEIGHT * STEPS, WIDTH_A) & is_aligned:
        m, worst = _update_band(
            bases, row, of_table, top, left, cut_largest, cut_count,
            first_table, second_table, scalars, clip, steps, HEIGHT, STEPS, NOMINAL, GRAD, True,
        )  # fmt: skip
    else:
        m, worst = _update_band(
            bases, row, of_table, top, left, cut_largest, cut_count,
            first_table, second_table, scalars, clip, steps, HEIGHT, STEPS, NOMINAL, GRAD, False,
        )  # fmt: skip
    note_not_finite(packed, of_table, worst)
    store_amaxes(packed, of_table, m, top, left, HEIGHT, STEPS, WIDTH_A, ROWS_A, COLUMNS_A, OWN_ROWS, OWN_COLUMNS)


@triton.jit(do_not_specialize=["n", "cut_count"])
def _cut_groups(
    bases,
    pieces,
    firsts,
    n,
    cut_largest,
    cut_count,
    first_table,
    second_table,
    scalars,
    clip,
    steps,
    skip,
    GRAD: tl.constexpr,
):
    """Round the moments of the first and the last group of a piece, if they are shared."""
    if tl.load(skip) != 0:
        return
    tile = tl.program_id(0).to(tl.int64)
    piece = find(firsts, n, tile)
    row = pieces + piece * PIECE_WIDTH
    bases += tl.load(row + BASE) * TENSORS
    _, count = _extent(row)
    which = tl.arange(0, 2)
    group = which * (count - 1)
    # A piece of one group has it once.
    has_group = (which == 0) | (group > 0)
    first, i, mask = _elements(row, group, has_group, 2, False)
    _update(
        bases, row, group, has_group, first, i, mask, cut_largest, cut_count,
        first_table, second_table, scalars, clip, steps, GRAD, False, True,
    )  # fmt: skip
