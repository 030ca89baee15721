"""PackedAmax: the amaxes of every weight of every format in one buffer, reduced once.

MAX is exact, and an amax of bf16-rounded elements is exact in bf16, so the buffer is bf16 when
every nominal dtype is, else FP32. The NVFP4 tensor amax is the maximum of the reduced block amaxes
and needs no collective of its own.

Behind the amaxes ride the elements next to odd NVFP4 cuts: two owners share that byte and both
write the whole of it, so each needs the other's element. Non-owners send -Inf. A NaN never enters a
MAX; it is sent as a flag.

Where a host keeps the amax history of a weight, its amax grows until the host takes it: what is
there on any rank goes into the same reduction.

Weights that share a tensor amax have one more place for it, in which each rank enters the largest
that it has measured of any of them. Then comes a flag for each weight, which is 1 where a master is
NaN or Inf on any rank (`FiniteMasters`), and two numbers by which ranks that are in different calls
find out (`SameCall`). Where an optimizer steps, weights without amaxes have a flag too: the step
measures them, and their amaxes go to one place at the end, where nothing reads them.

Where the caller gathers scales, a rank needs only the amaxes of the rows around its span. These lie
last, different ones on every rank, and are not reduced. The rows of blocks that a cut divides are
copied to places among the reduced amaxes that all ranks know, and back.

    | amaxes | shared | cut rows of blocks | boundary | flags | call | own amaxes, unread |
    |<------------------------- reduced -------------------------->|<--- not reduced ---->|
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.cast.partition import MasterShard, Partition
from zerocast.cast.pipeline import AmaxReduction
from zerocast.distributed.agreement import SameCall
from zerocast.distributed.group import Group
from zerocast.distributed.ownership import Ownership
from zerocast.formats import AmaxPolicy, Block, Columnwise, FormatSpec
from zerocast.formats.layout import amax_counts, amax_grid
from zerocast.formats.shared_amax import groups_cast_together


@dataclass(frozen=True)
class BoundaryByte:
    """A byte of weight `index` whose elements `element` and `element + 1` belong to two ranks,
    `owners` in that order.
    """

    index: int
    element: int
    owners: tuple[int, int]


def boundary_bytes(index: int, ownership: Ownership) -> Iterator[BoundaryByte]:
    """The bytes of one weight that two ranks share."""
    if ownership.items[index].unit == 1:
        return
    for first, second in itertools.pairwise(ownership.pieces.get(index, ())):
        if first.stop == second.start and first.stop % 2:
            yield BoundaryByte(index, first.stop - 1, (first.rank, second.rank))


class PackedAmax(AmaxReduction):
    """The buffer, the place in it of the amaxes of each weight that this rank computes scales of
    (`offsets`), the boundary bytes behind them, `same_call`, and the places of the `flags` of
    weights whose masters are measured (`flag_of`).

    `boundary_elements` are (weight, element, slot) of the elements of other ranks that this rank
    writes beside its own; `received` holds them after a reduction, f32 by slot.
    """

    def __init__(
        self, partition: Partition, cast: Sequence[int], device: torch.device, group: Group, is_stepped: bool
    ) -> None:
        self._shards, self._group = partition.shards, group
        self.boundary_bytes: list[BoundaryByte] = []
        self._external = [index for index in cast if self._shards[index].weight.state.external_scaling_state]
        everywhere = [index for index in cast if self._shards[index].cuts is None]
        gathered = [index for index in cast if self._shards[index].cuts is not None]
        weights = {index: self._shards[index].weight for index in cast}
        groups = groups_cast_together({i: (w.state.shared_amax, w.format) for i, w in weights.items()})
        # members of a group lie behind each other
        together = list(dict.fromkeys([index for group in groups for index in group] + everywhere))
        self.offsets, size = self._place(together, 0)
        self.shared = {index: size + slot for slot, group in enumerate(groups) for index in group}
        size += len(groups)
        dtypes = {self._dtype(index) for index in cast if self._has_amaxes(index)}
        for index in everywhere:
            self.boundary_bytes += boundary_bytes(index, partition.ownership)
        rows = [row for index in gathered for row in _cut_rows_of(self._shards[index])]
        cut_size = sum(row.cuts.numel() * row.across for row in rows)
        first_flag = size + cut_size + 4 * len(self.boundary_bytes)
        without = [index for index in cast if not self._has_amaxes(index)]
        measured = [index for index in cast if is_stepped or self._has_amaxes(index)]
        self.flag_of = {index: first_flag + number for number, index in enumerate(measured)}
        numel = first_flag + len(measured)
        slots = 2 if dtypes and group.size > 1 else 0
        own, end = self._place([i for i in gathered if self._shards[i].span.numel], numel + slots)
        self.offsets |= own | dict.fromkeys(without, (end, end))
        end += bool(without)
        dtype = torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32
        self.buffer = torch.zeros(end, dtype=dtype, device=device)
        self._reduced = self.buffer[: numel + slots]
        self.same_call = SameCall(group, self.buffer[numel : numel + slots]) if slots else None
        self._cast = [part for part in (self.buffer[:numel], self.buffer[numel + slots :]) if part.numel()]
        self._values, self._is_nan = self.buffer[size + cut_size : first_flag].view(2, -1)
        self.flags = self.buffer[first_flag:numel]
        self.received = torch.zeros(2 * len(self.boundary_bytes), dtype=torch.float32, device=device)
        self.boundary_elements = [
            (byte.index, byte.element + side, 2 * slot + side)
            for slot, byte in enumerate(self.boundary_bytes)
            for side in (0, 1)
            if byte.owners[1 - side] == group.rank
        ]
        ends = [0, *(self._end(group[-1]) for group in groups)]
        self._grouped = self.buffer[: ends[-1]]
        self._segments = torch.tensor(ends, dtype=torch.int64, device=device)
        per_tensor = [index for index in self.shared if self._shards[index].weight.format.block is None]
        self._per_tensor = torch.tensor(
            [self.offsets[index][0] for index in per_tensor], dtype=torch.int64, device=device
        )
        self._shared_of = torch.tensor([self.shared[index] for index in per_tensor], dtype=torch.int64, device=device)
        self._external_slots = torch.tensor([self.offsets[index][0] for index in self._external], device=device)
        self._here, self._there = (place.to(device) for place in self._cut_places(gathered, size))

    def begin(self) -> None:
        """Forget the amaxes of the last cast."""
        for part in self._cast:
            part.zero_()
        if self.boundary_bytes:
            self._values.fill_(-torch.inf)

    def reduce(self) -> None:
        """The one collective of a cast."""
        self._put_external()
        self._put_shared()
        self._put_boundary()
        if self._here.numel():
            self.buffer[self._there] = self.buffer[self._here]
        if self._reduced.numel():
            self._group.all_reduce_max(self._reduced, "the packed amaxes of a cast")
        if self._per_tensor.numel():
            self.buffer[self._per_tensor] = self.buffer[self._shared_of]
        if self.same_call:
            self.same_call.reduced()
        if self._here.numel():
            self.buffer[self._here] = self.buffer[self._there]
        if self.boundary_elements:
            self.received.copy_(self._values.float().masked_fill_(self._is_nan > 0, torch.nan))

    def _place(self, weights: Sequence[int], size: int) -> tuple[dict[int, tuple[int, int]], int]:
        """(where the rowwise and the columnwise amaxes of each begin, the end) from `size` on."""
        offsets = {}
        for index in weights:
            rowwise, columnwise = _counts(self._shards[index])
            offsets[index] = (size, size + rowwise)
            size += rowwise + columnwise
        return offsets, size

    def _has_amaxes(self, index: int) -> bool:
        """True if any rank has, so that all agree."""
        return self._shards[index].weight.format.amax_policy is not AmaxPolicy.NONE

    def _dtype(self, index: int) -> torch.dtype:
        return torch.float32 if index in self._external else self._shards[index].weight.dtype

    def _cut_places(self, gathered: Sequence[int], size: int) -> tuple[Tensor, Tensor]:
        """(places of own amaxes, places from `size` on where they are reduced) of cut rows of
        blocks that this rank has a part of.
        """
        here, there = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for index in gathered:
            shard = self._shards[index]
            for row, first in zip(_cut_rows_of(shard), self.offsets.get(index, (0, 0)), strict=False):
                if shard.span.numel:
                    unit = row.height * shard.weight.matrix_shape[1]
                    ours = (row.cuts * unit < shard.span.stop) & ((row.cuts + 1) * unit > shard.span.start)
                    across = torch.arange(row.across)
                    places = (row.cuts[ours] - shard.rows.start // row.height).view(-1, 1) * row.across
                    here.append((first + places + across).view(-1))
                    there.append((size + ours.nonzero() * row.across + across).view(-1))
                size += row.cuts.numel() * row.across
        return torch.cat(here), torch.cat(there)

    def _put_boundary(self) -> None:
        """Enter this rank's elements of the boundary bytes, rounded to the nominal dtype."""
        for slot, byte in enumerate(self.boundary_bytes):
            for side, owner in enumerate(byte.owners):
                if owner == self._group.rank:
                    value = _element(self._shards[byte.index], byte.element + side)
                    nan = value.isnan()
                    self._values[2 * slot + side] = value.masked_fill(nan, -torch.inf)
                    self._is_nan[2 * slot + side] = nan

    def _end(self, index: int) -> int:
        """Where the amaxes of a weight end."""
        return self.offsets[index][0] + sum(_counts(self._shards[index]))

    def _put_shared(self) -> None:
        """Enter the largest amax that this rank has measured of each group."""
        if self.shared:
            first = min(self.shared.values())
            largest = torch.segment_reduce(self._grouped, "max", offsets=self._segments, initial=0)
            self.buffer[first : first + largest.numel()] = largest

    def _put_external(self) -> None:
        """Enter the amaxes that hosts keep, as they have grown so far."""
        if self._external:
            amaxes = [self._shards[index].weight.amax for index in self._external]
            grown = torch.cat([amax for amax in amaxes if amax is not None])
            self.buffer[self._external_slots] = self.buffer[self._external_slots].maximum(grown)


@dataclass(frozen=True)
class CutRows:
    """The rows of blocks, i64 `cuts`, that a cut divides in one grid of a weight; each has `height`
    rows of elements and `across` amaxes.
    """

    cuts: Tensor
    height: int
    across: int


def cut_rows(fmt: FormatSpec, matrix: Block, cuts: range) -> list[CutRows]:
    """The rows of blocks that cuts divide in the rowwise grid, and in an own columnwise one."""
    rows, columns = matrix
    grids = [fmt.block, fmt.columnwise_block if fmt.columnwise is Columnwise.OWN_GRID else None]
    places, found = torch.tensor(cuts, dtype=torch.int64), []
    for height, width in (block for block in grids if block):
        inside = places % (width if height == 1 else height * columns) != 0
        divided = torch.unique(places[inside] // (height * columns))
        found.append(CutRows(divided, height, amax_grid((height, width), rows, columns)[1]))
    return found


def _cut_rows_of(shard: MasterShard) -> list[CutRows]:
    assert shard.cuts is not None
    return cut_rows(shard.weight.format, shard.weight.matrix_shape, shard.cuts)


def _counts(shard: MasterShard) -> tuple[int, int]:
    """How many amaxes this rank has of a weight, rowwise and columnwise."""
    return amax_counts(shard.weight.format, shard.rows.numel, shard.weight.matrix_shape[1])


def _element(shard: MasterShard, element: int) -> Tensor:
    assert shard.master is not None
    return shard.master.detach()[element - shard.span.start].to(shard.weight.dtype)
