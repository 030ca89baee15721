"""Which rows of a weight a rank holds and which it casts. Integers only.

FSDP2 gives rank r the rows `[r*C, (r+1)*C)` of the first dimension with `C = ceil(M / world)`, less
at the end: a shard may be short or empty, and a boundary may cut a row of blocks. Rows here are
those of the weight as a matrix.
"""

import functools
from dataclasses import dataclass

import torch

from zerocast.formats import AmaxPolicy, FormatSpec, ScaleRule, layout
from zerocast.formats.layout import Span


@dataclass(frozen=True)
class RowShards:
    """`rows` of a matrix over `world` ranks, `chunk` of them each."""

    rows: int
    chunk: int
    world: int

    def span(self, rank: int) -> Span:
        """The rows of a rank."""
        return Span(min(rank * self.chunk, self.rows), min((rank + 1) * self.chunk, self.rows))

    def touched(self, rank: int, height: int) -> Span:
        """The block rows that a rank holds any row of."""
        span = self.span(rank)
        return Span(span.start // height, -(-span.stop // height)) if span.numel else Span(0, 0)

    def owned(self, rank: int, height: int) -> Span:
        """The block rows whose first row a rank holds: every block row has one owner."""
        span = self.span(rank)
        return Span(-(-span.start // height), -(-span.stop // height))

    def most_owned(self, height: int) -> int:
        """The number of block rows that any rank owns at most."""
        return self.owned(0, height).numel  # no other shard begins with a block row for sure

    def cut(self, height: int) -> tuple[int, ...]:
        """The block rows that more than one rank holds rows of, in order."""
        return _cut(self.rows, self.chunk, height)

    def owners(self, height: int) -> tuple[list[int], list[int]]:
        """(rank, place among the rank's own) of every block row."""
        blocks = range(-(-self.rows // height))
        ranks = [block * height // self.chunk for block in blocks]
        return ranks, [block - self.owned(rank, height).start for block, rank in zip(blocks, ranks, strict=True)]


@functools.lru_cache(maxsize=1024)  # the weights of a model repeat a few shapes
def _cut(rows: int, chunk: int, height: int) -> tuple[int, ...]:
    return tuple(sorted({row // height for row in range(chunk, rows, chunk) if row % height}))


@dataclass(frozen=True)
class ShardGeometry:
    """The part of a weight of `columns` columns that `rank` casts, as a small weight of its own;
    equal shards compare equal.

    The small weight has the block rows that the shard touches, so that the stages need to know
    nothing of FSDP2. Two-level scales come from the tensor amax, which the stage takes as the
    largest amax of the weight it is given: a ghost block row, one of no elements at the end whose
    amaxes hold the reduced tensor amax, makes it find that.
    """

    format: FormatSpec
    nominal: torch.dtype
    shards: RowShards
    columns: int
    rank: int

    @property
    def rows(self) -> int:
        """Rows of the whole weight."""
        return self.shards.rows

    @property
    def has_ghost(self) -> bool:
        """True if a block row of no elements carries the tensor amax."""
        return self.format.scale_rule is ScaleRule.TWO_LEVEL

    @property
    def has_tensor_amax(self) -> bool:
        """True if an amax of the whole tensor is reduced."""
        return self.format.has_tensor_amax or self.format.amax_policy is AmaxPolicy.DELAYED

    @functools.cached_property
    def first_row(self) -> int:
        """The row of the weight that the small weight begins with."""
        return self._touched.start * self._height

    @functools.cached_property
    def cast_rows(self) -> int:
        """Rows of the small weight, of the ghost too."""
        held = min(self.rows, self._touched.stop * self._height) - self.first_row if self._touched.numel else 0
        if self._blocks:
            return held + (self._height if self.has_ghost else 0)
        return max(1, held)

    @property
    def takes_part(self) -> bool:
        """True if this rank has anything to compute: for scales of blocks alone, only where it
        has rows.
        """
        return self.cast_rows > 0

    @functools.cached_property
    def span(self) -> Span:
        """The elements of the small weight that this rank holds."""
        held = self.shards.span(self.rank)
        start = (held.start - self.first_row) * self.columns
        return Span(start, start + held.numel * self.columns) if held.numel else Span(0, 0)

    @property
    def span_in_weight(self) -> Span:
        """The elements of the whole weight that this rank holds."""
        rows = self.shards.span(self.rank)
        return Span(rows.start * self.columns, rows.stop * self.columns)

    @property
    def amax_counts(self) -> tuple[int, int]:
        """Number of amaxes in the rowwise grid and in an own columnwise grid of the small
        weight.
        """
        return layout.amax_counts(self.format, self.cast_rows, self.columns) if self.takes_part else (0, 0)

    def grids(self) -> list[tuple[int, int, int]]:
        """(height, amaxes, first amax among this weight's) of the rows of exchange blocks of each
        grid, which a boundary can cut; the last row may have fewer amaxes.
        """
        found, fmt = [], self.format
        if fmt.block and fmt.exchange_block:
            height = fmt.exchange_block[0]
            across = layout.amax_grid(fmt.block, self.rows, self.columns)[1]
            found.append((height, height // fmt.block[0] * across, 0))
        if self.format.columnwise_block:
            found.append((self.format.columnwise_block[0], self.columns, self.amax_counts[0]))
        return found

    @property
    def tensor_amaxes(self) -> list[int]:
        """The amaxes among this weight's that the reduced one of the tensor is put in: with one
        scale a tensor its own, with two levels one in the ghost.
        """
        fmt, (count, _) = self.format, self.amax_counts
        if fmt.scale_rule is ScaleRule.TWO_LEVEL:
            return [count - layout.amax_grid(fmt.block, self.rows, self.columns)[1]]
        return [0] if fmt.amax_policy is not AmaxPolicy.NONE and fmt.block is None and count else []

    @property
    def _blocks(self) -> list[int]:
        return [block[0] for block in (self.format.exchange_block, self.format.columnwise_block) if block]

    @property
    def _height(self) -> int:
        return max(self._blocks, default=1)

    @functools.cached_property
    def _touched(self) -> Span:
        return self.shards.touched(self.rank, self._height)
