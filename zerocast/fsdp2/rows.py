"""RowShards: which rows of a weight each rank of a shard group holds, and which block rows that cuts. Integers only.

FSDP2 gives rank r the rows `[r*C, (r+1)*C)` of the first dimension with `C = ceil(M / world)`, less at the end: a shard may be
short or empty, and a boundary may cut a row of blocks. Rows here are those of the weight as a matrix.
"""

from dataclasses import dataclass

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
        return max(self.owned(rank, height).numel for rank in range(self.world))

    def cut(self, height: int) -> list[int]:
        """The block rows that more than one rank holds rows of."""
        boundaries = (self.span(rank).start for rank in range(1, self.world))
        return sorted({row // height for row in boundaries if row < self.rows and row % height})

    def owners(self, height: int) -> tuple[list[int], list[int]]:
        """(rank, place among the rank's own) of every block row."""
        blocks = range(-(-self.rows // height))
        ranks = [block * height // self.chunk for block in blocks]
        return ranks, [block - self.owned(rank, height).start for block, rank in zip(blocks, ranks, strict=True)]
