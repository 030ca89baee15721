"""CutBlocks: the elements of the rows of blocks that a boundary between ranks cuts.

Where a block chooses its scale by its elements (`FormatSpec.chooses_scales`), no rank can choose
for a block of which it owns a part. The elements of such rows of blocks, rounded to the nominal
dtype, ride behind the amaxes in the same all-reduce: every rank then has the whole row, and chooses
for it as for its own. A NaN would not survive a MAX and travels as Inf: with either in a block no
error is smaller than another.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerocast.cast.partition import MasterShard
from zerocast.cast.weight_table import WeightTable, WeightTables
from zerocast.formats.layout import Span


@dataclass(frozen=True)
class CutRow:
    """The elements `span` of the weight that is called `key`, a row of blocks, from `offset` on
    among all that are exchanged.
    """

    key: int | str
    span: Span
    offset: int


def cut_rows_of(key: int | str, unit: int, ends: Iterable[int], offset: int) -> list[CutRow]:
    """The rows of blocks, of `unit` elements each, inside which spans of ranks end."""
    cut = sorted({end // unit for end in ends if end % unit})
    return [CutRow(key, Span(row * unit, (row + 1) * unit), offset + i * unit) for i, row in enumerate(cut)]


class CutBlocks:
    """The cut `rows` of some weights, and the part `elements` of a buffer in which they are
    reduced.
    """

    def __init__(self, rows: Sequence[CutRow], elements: Tensor) -> None:
        self.rows, self.elements = rows, elements

    def put(self, shards: Mapping[Any, MasterShard]) -> None:
        """Enter the elements of this rank, and -Inf for those of others."""
        if not self.rows:
            return
        self.elements.fill_(-torch.inf)
        targets, rounded = [], []
        for row in self.rows:
            shard = shards.get(row.key)
            common = shard.span.intersect(row.span) if shard else Span(0, 0)
            if shard and shard.master is not None and common.numel:
                master = shard.master.detach()[common.start - shard.span.start :][: common.numel]
                rounded.append(master.to(shard.weight.dtype))
                targets.append(self.elements[row.offset + common.start - row.span.start :][: common.numel])
        if targets:
            torch._foreach_copy_(targets, rounded)
        self.elements.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)

    def received(self) -> None:
        """After a reduction: elements that no rank owns are zeros."""
        if self.rows:
            self.elements.masked_fill_(self.elements == -torch.inf, 0)

    def tables(
        self,
        shards: Mapping[Any, MasterShard],
        offsets: Mapping[Any, tuple[int, int]],
        device: torch.device,
        backend: str,
    ) -> list[WeightTable]:
        """Tables by which stage `choose_scales` chooses for those of these rows that this rank has
        a part of, given where the amaxes of each weight begin.
        """
        tables = WeightTables(device, backend)
        for row in self.rows:
            shard = shards.get(row.key)
            if shard and shard.span.intersect(row.span).numel:
                table = tables.of(shard.weight, self.elements.dtype)
                of_weight = table.add(shard.weight, offsets[row.key])
                table.set_span(of_weight, shard, row.span, self.elements[row.offset :][: row.span.numel])
        return tables.freeze()
