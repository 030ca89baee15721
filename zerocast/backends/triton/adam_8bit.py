"""Stage adam_8bit: AdamW on pieces of weights whose moments are kept in 8 bits
(docs/formats/moments_8bit.md).

A program takes some groups of one piece, a row of a tile each. Values of codes are read from tables
of the reference, so that they are its values to the bit. A code is guessed by a formula that errs
by one at most, and then decided by comparisons with the values of codes, as docs/formats says.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.descriptor import Piece
from zerocast.backends.reference.moments import first_values, second_values
from zerocast.backends.triton.adam_step import adamw
from zerocast.backends.triton.codec import DTYPES, INF, as_f32, magnitude
from zerocast.backends.triton.launch import addresses, find, launch, skip_flag, tiling
from zerocast.backends.triton.tiles import load_f32, load_raw, store_f32, store_raw
from zerocast.formats.layout import MOMENT_GROUP, moment_groups

GROUPS = 16
REGISTERS = 128

GROUP = tl.constexpr(MOMENT_GROUP)
PIECE_WIDTH = tl.constexpr(len(Piece))
OFFSET = tl.constexpr(int(Piece.OFFSET))
PIECE_NUMEL = tl.constexpr(int(Piece.NUMEL))
SCALARS = tl.constexpr(int(Piece.SCALARS))
PIECE_START = tl.constexpr(int(Piece.START))
PIECE_COLUMNS = tl.constexpr(int(Piece.COLUMNS))
SCALE = tl.constexpr(int(Piece.SCALE))
CUT_FIRST = tl.constexpr(int(Piece.CUT_FIRST))
CUT_LAST = tl.constexpr(int(Piece.CUT_LAST))
KEY = tl.constexpr(int(Piece.KEY))
# 2**-100 and the largest finite f32, as bits.
SMALLEST_SCALE = tl.constexpr(27 << 23)
LARGEST_SCALE = tl.constexpr(0x7F7FFFFF)


@dataclass(frozen=True)
class PieceGroups:
    """Cuts the groups of pieces into runs of `size`."""

    size: int

    def count(self, row: list[int]) -> int:
        """The number of runs of one piece."""
        return -(-moment_groups(row[Piece.START], row[Piece.NUMEL], row[Piece.COLUMNS]) // self.size)


@dataclass(frozen=True)
class CutPieces:
    """One tile for each piece that has part of a group that other ranks have parts of."""

    def count(self, row: list[int]) -> int:
        """The number of tiles of one piece."""
        return int(max(row[Piece.CUT_FIRST], row[Piece.CUT_LAST]) >= 0)


def adam_8bit(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scales: Tensor,
    pieces: Tensor,
    scalars: Tensor,
    clip: Tensor,
    step: Tensor,
    cut_largest: Tensor,
    finishes: bool,
    skip: Tensor | None,
) -> None:
    """Run Adam over the pieces of one flat shard and keep its moments in 8 bits."""
    device = master.device
    tiles = tiling(pieces, CutPieces() if finishes else PieceGroups(GROUPS))
    bases = addresses((master, grad, exp_avg, exp_avg_sq), device)
    of_groups = scales, scales.shape[1], cut_largest, cut_largest.shape[1]
    of_step = scalars, clip, step, skip_flag(skip, device)
    head = bases, pieces, tiles.firsts, tiles.rows, *of_groups, *_values(device), *of_step
    kernel, groups = (_cut_groups, 2) if finishes else (_groups, GROUPS)
    launch(kernel, tiles.total, device, *head, COUNT=groups, GRAD=DTYPES[grad.dtype], registers=REGISTERS)


@functools.cache
def _values(device: torch.device) -> tuple[Tensor, Tensor]:
    """The values of the codes of both moments, in units of the scale."""
    return first_values(device), second_values(device)


@triton.jit
def _extent(row):
    """(groups of the weight before the first one of a piece, groups of the piece)."""
    start = tl.load(row + PIECE_START)
    before = _group_of(row, start)
    return before, _group_of(row, start + tl.load(row + PIECE_NUMEL) - 1) + 1 - before


@triton.jit
def _group_of(row, element):
    """The number of the group of an element, counted over the rows of its weight."""
    columns = tl.load(row + PIECE_COLUMNS)
    return element // columns * ((columns - 1) // GROUP + 1) + element % columns // GROUP


@triton.jit
def _mix(x):
    """The finalizer of MurmurHash3 on u32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _random_numbers(key, step, element):
    """The random numbers of elements of a weight, f32."""
    of_step = _mix(key.to(tl.uint32) + step.to(tl.uint32) * 0x9E3779B9)
    bits = _mix(_mix(of_step + (element >> 32).to(tl.uint32)) + element.to(tl.uint32))
    return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _largest(x):
    """The largest positive number of each row as bits, 0 without one. NaN is ignored."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.max(tl.where(bits > INF, 0, tl.maximum(bits, 0)), 1)


@triton.jit
def _scale(largest):
    """The scales of groups from their largest values, as bits."""
    scale = tl.minimum(tl.maximum(largest, SMALLEST_SCALE), LARGEST_SCALE)
    return as_f32(tl.where(largest > 0, scale, 0))


@triton.jit
def _at_most(x, scale):
    """Values between 0 and a scale; 0 for NaN."""
    positive = tl.where(x > 0, x, 0.0)
    return tl.where(positive < scale, positive, scale)


@triton.jit
def _decide(code, size, scale, values, LAST: tl.constexpr):
    """(the largest code whose value is at most `size`, that value, the value of the next code), of
    a guess that errs by one at most.
    """
    code = tl.minimum(tl.maximum(code, 0), LAST)
    code -= (tl.load(values + code) * scale > size).to(tl.int32)
    following = tl.load(values + tl.minimum(code + 1, LAST)) * scale
    code += ((code < LAST) & (following <= size)).to(tl.int32)
    return code, tl.load(values + code) * scale, tl.load(values + tl.minimum(code + 1, LAST)) * scale


@triton.jit
def _encode_first(m, scale, values):
    """The codes of first moments as int32, rounded to nearest by positive scales."""
    size = _at_most(tl.abs(m), scale)
    ratio = tl.div_rn(size, scale)
    guess = tl.div_rn(254.0 * ratio, 1.0 + ratio).to(tl.int32)
    code, low, high = _decide(guess, size, scale, values, 127)
    code += (size - low > high - size).to(tl.int32)
    return tl.where(m < 0, -code, code)


@triton.jit
def _encode_second(v, scale, random, values):
    """The codes of second moments as int32, rounded at random by positive scales."""
    size = _at_most(v, scale)
    guess = (259.0 * tl.sqrt_rn(tl.sqrt_rn(tl.div_rn(size, scale))) - 4.0).to(tl.int32)
    code, low, high = _decide(guess, size, scale, values, 255)
    root = tl.sqrt_rn(low)
    code += (tl.sqrt_rn(size) - root > random * (tl.sqrt_rn(high) - root)).to(tl.int32)
    return tl.where(size > 0, tl.maximum(code, 1), 0)


@triton.jit
def _elements(row, group, has_group, COUNT: tl.constexpr, FULL: tl.constexpr):
    """(an element of the weight, the distances `[COUNT, GROUP]` of the groups' elements from it,
    the mask of those that the piece has).
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
        across = (columns - 1) // GROUP + 1
        number = before + group[:, None]
        column = number % across * GROUP + slot
        i = number // across * columns + column - start
        return start, i, has_group[:, None] & (column < columns) & (i >= 0) & (i < tl.load(row + PIECE_NUMEL))


@triton.jit
def _cut_places(row, group, has_group):
    """The places of groups among cut ones, or -1. A piece of one group has it in either column."""
    _, count = _extent(row)
    first = tl.load(row + CUT_FIRST)
    last = tl.where(group == count - 1, tl.load(row + CUT_LAST), -1)
    return tl.where(has_group, tl.where((group == 0) & (first >= 0), first, last), -1)


@triton.jit
def _old_moments(m_at, v_at, i, mask, m_scale, v_scale, first_table, second_table, FULL: tl.constexpr):
    """Both moments as they were kept, f32."""
    m_code = load_raw(m_at, i, mask, tl.int8, FULL).to(tl.int32)
    v_code = load_raw(v_at, i, mask, tl.uint8, FULL).to(tl.int32)
    m = tl.load(first_table + tl.abs(m_code)) * m_scale
    return tl.where(m_code < 0, -m, m), tl.load(second_table + v_code) * v_scale


@triton.jit
def _codes(m, v, m_scale, v_scale, random, first_table, second_table):
    """The codes of both moments. Those of groups of zeros are 0."""
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
    scales,
    scale_count,
    cut_largest,
    cut_count,
    first_table,
    second_table,
    scalars,
    clip,
    step,
    COUNT: tl.constexpr,
    GRAD: tl.constexpr,
    FULL: tl.constexpr,
    FINISHES: tl.constexpr,
):
    """Update groups `[COUNT]` of a piece, or finish them."""
    first, i, mask = _elements(row, group, has_group, COUNT, FULL)
    at = tl.load(row + OFFSET) - tl.load(row + PIECE_START) + first
    p_at = tl.load(bases) + at * 4
    g_at = tl.load(bases + 1) + at * (4 if GRAD == tl.float32 else 2)
    m_at = tl.load(bases + 2) + at
    v_at = tl.load(bases + 3) + at
    places = scales + tl.load(row + SCALE) + group
    m_scale = tl.load(places, mask=has_group, other=0)[:, None]
    v_scale = tl.load(places + scale_count, mask=has_group, other=0)[:, None]
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
    tl.store(places, m_scale, mask=written)
    tl.store(places + scale_count, v_scale, mask=written)
    random = _random_numbers(tl.load(row + KEY), tl.load(step), first + i)
    m_code, v_code = _codes(m, v, m_scale[:, None], v_scale[:, None], random, first_table, second_table)
    store_raw(m_at, i, m_code, mask & written[:, None], tl.int8, FULL)
    store_raw(v_at, i, v_code, mask & written[:, None], tl.uint8, FULL)


@triton.jit(do_not_specialize=["n", "scale_count", "cut_count"])
def _groups(
    bases,
    pieces,
    firsts,
    n,
    scales,
    scale_count,
    cut_largest,
    cut_count,
    first_table,
    second_table,
    scalars,
    clip,
    step,
    skip,
    COUNT: tl.constexpr,
    GRAD: tl.constexpr,
):
    """Update a run of groups; keep the codes of cut ones and enter their largest values."""
    if tl.load(skip) != 0:
        return
    tile = tl.program_id(0).to(tl.int64)
    piece = find(firsts, n, tile)
    row = pieces + piece * PIECE_WIDTH
    _, count = _extent(row)
    first = (tile - tl.load(firsts + piece)) * COUNT
    group = first + tl.arange(0, COUNT)
    has_group = group < count

    at = tl.load(row + OFFSET) + first * GROUP
    p_at = tl.load(bases) + at * 4
    g_at = tl.load(bases + 1) + at * (4 if GRAD == tl.float32 else 2)
    aligned = (p_at | g_at | (tl.load(bases + 2) + at) | (tl.load(bases + 3) + at)) % 16 == 0
    # Groups of the same size from end to end, none of which can be cut.
    whole = (tl.load(row + PIECE_COLUMNS) % GROUP == 0) & (tl.load(row + PIECE_START) % GROUP == 0)
    if aligned & whole & ((first + COUNT) * GROUP <= tl.load(row + PIECE_NUMEL)):
        _update(
            bases, row, group, has_group, scales, scale_count, cut_largest, cut_count, first_table, second_table,
            scalars, clip, step, COUNT, GRAD, True, False,
        )  # fmt: skip
    else:
        _update(
            bases, row, group, has_group, scales, scale_count, cut_largest, cut_count, first_table, second_table,
            scalars, clip, step, COUNT, GRAD, False, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n", "scale_count", "cut_count"])
def _cut_groups(
    bases,
    pieces,
    firsts,
    n,
    scales,
    scale_count,
    cut_largest,
    cut_count,
    first_table,
    second_table,
    scalars,
    clip,
    step,
    skip,
    COUNT: tl.constexpr,
    GRAD: tl.constexpr,
):
    """Round the moments of the first and the last group of a piece, where they are cut."""
    if tl.load(skip) != 0:
        return
    tile = tl.program_id(0).to(tl.int64)
    piece = find(firsts, n, tile)
    row = pieces + piece * PIECE_WIDTH
    _, count = _extent(row)
    which = tl.arange(0, COUNT)
    group = which * (count - 1)
    # A piece of one group has it once.
    has_group = (which == 0) | (group > 0)
    _update(
        bases, row, group, has_group, scales, scale_count, cut_largest, cut_count, first_table, second_table,
        scalars, clip, step, COUNT, GRAD, False, True,
    )  # fmt: skip
