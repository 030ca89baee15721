"""PackedAmaxes: one buffer with the amaxes of all weights that are cast together, and the one
reduction of a cast.

MAX is exact, and an amax of bf16-rounded elements is exact in bf16. So the buffer is bf16 if every
nominal dtype is bf16, else FP32. A NaN never enters a MAX; a flag is sent for it.

Training frameworks differ only in the amaxes that have to be reduced, which an AmaxLayout
describes. The layout of a plan, whose ranks hold any spans of a weight (`layout_of_plan`):

    | amaxes | shared | split block rows | boundary | flags | call | own amaxes, unread |
    |<------------------------- reduced -------------------------->|<-- not reduced --->|

* amaxes: of the weights whose scales every rank computes in full. The NVFP4 tensor amax is the
  maximum of the reduced block amaxes and needs no other collective.
* shared: one element per group of weights that share a tensor amax. Each rank enters the largest
  amax that it has measured of any weight of the group.
* own amaxes: of the weights whose scales the caller gathers. A rank needs only the amaxes of the
  rows around its span, so they differ between ranks.
* split block rows: own amaxes of rows that a boundary between ranks splits. They are copied here,
  to offsets that all ranks know, reduced, and copied back.
* boundary: elements next to odd NVFP4 boundaries (`BoundaryElements`).
* flags: one for each weight, 1 where a master is NaN or Inf on any rank. Where an optimizer steps,
  weights without amaxes have a flag too: the step measures them, and their amaxes go to one element
  at the end, which nothing reads.
* call: two numbers that differ if ranks are in different calls (`CastReports`).

Under FSDP2, whose ranks hold complete rows, all amaxes are own amaxes, and only tensor amaxes and
split block rows are reduced (`zerocast.fsdp2.amax_layout`).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from zerocast.cast.partition import MasterShard, Partition
from zerocast.distributed.group import Group
from zerocast.distributed.ownership import Ownership
from zerocast.distributed.rank_report import CastReports
from zerocast.formats import AmaxPolicy, Block, Columnwise, FormatSpec
from zerocast.formats.layout import Span, amax_counts, amax_grid, weight_amax_counts
from zerocast.formats.shared_amax import groups_cast_together

# The index of a weight in its plan, or its name.
Weight = TypeVar("Weight")


class AmaxLayout(Generic[Weight]):
    """The layout of the buffer of amaxes, in elements. Regions follow each other in the
    order in which they are placed.

    Attributes:
        size: all elements so far.
        offsets: the offsets of the rowwise amaxes of a weight, and of its columnwise amaxes if it
            has a separate columnwise grid.
        flag_of: the offset of a weight's flag.
        shared: the offset of the reduced tensor amax of a weight. Weights of a group have one
            offset; a weight that shares its amax with no other may be a group by itself.
        flags: all flags.
        boundary: the elements next to odd boundaries, four numbers for each.
        call: the numbers by which ranks compare their calls, written before `begin`, which keeps
            them: a digest of the call and its negative, or the casts of replicas under FSDP2. Empty
            if nothing is compared.
        reduced: the elements that ranks reduce.
    """

    def __init__(self) -> None:
        self.size = 0
        self.offsets: dict[Weight, tuple[int, int]] = {}
        self.flag_of: dict[Weight, int] = {}
        self.shared: dict[Weight, int] = {}
        self.flags = self.boundary = self.call = self.reduced = Span(0, 0)
        # The offset at which the amaxes of each group begin, and the offset at which the last group
        # ends.
        self.group_bounds = [0]
        # The elements in which the largest amax of each group is reduced.
        self.maxima = Span(0, 0)
        # (offset, maximum): offsets that receive the reduced maximum of their group.
        self.receivers: list[tuple[int, int]] = []
        # Offsets of own amaxes, and the offsets where these are reduced.
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []

    def reserve(self, numel: int) -> Span:
        """Reserve the next `numel` elements, and return their span."""
        span = Span(self.size, self.size + numel)
        self.size = span.stop
        return span

    def place(self, weight: Weight, counts: tuple[int, int]) -> None:
        """Place the given numbers of rowwise and columnwise amaxes of a weight."""
        first = self.reserve(sum(counts)).start
        self.offsets[weight] = first, first + counts[0]

    def place_groups(self, groups: Sequence[Sequence[Weight]], counts: Mapping[Weight, tuple[int, int]]) -> None:
        """Place the amaxes of groups whose largest amax is reduced."""
        self.group_bounds = [self.size]
        for group in groups:
            for weight in group:
                self.place(weight, counts[weight])
            self.group_bounds.append(self.size)

    def place_maxima(self, groups: Sequence[Sequence[Weight]]) -> None:
        """Place one maximum for each of the groups."""
        self.maxima = self.reserve(len(groups))
        for number, group in enumerate(groups):
            self.shared |= dict.fromkeys(group, self.maxima.start + number)

    def place_flags(self, weights: Sequence[Weight]) -> None:
        """Place a flag for each of these weights."""
        self.flags = self.reserve(len(weights))
        self.flag_of = {weight: self.flags.start + number for number, weight in enumerate(weights)}

    def reduce_at(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the own amaxes at the offsets `sources` to the offsets `targets`, i64, for the
        reduction, and the reduced ones back.
        """
        self._sources.append(sources.view(-1))
        self._targets.append(targets.view(-1))

    def reduce_span_at(self, source: Span, target: Span) -> None:
        """Do the same for the span `source` and the span `target` of as many elements."""
        self.reduce_at(torch.arange(source.start, source.stop), torch.arange(target.start, target.stop))

    @property
    def exchanged(self) -> tuple[Tensor, Tensor]:
        """All pairs of `reduce_at`: (offsets of own amaxes, offsets to reduce them at), i64."""
        none = torch.empty(0, dtype=torch.int64)
        return torch.cat([none, *self._sources]), torch.cat([none, *self._targets])


class PackedAmaxes(Generic[Weight]):
    """The amaxes of some weights and how ranks reduce them.

    Attributes:
        buffer: f32 or bf16, everything that the layout places.
        offsets, flag_of, shared: as in the layout.
        flags: 1 for each weight whose masters are not finite.

    Args:
        layout: the layout of the buffer.
        dtype: of the buffer.
        device: of the buffer.
        group: the ranks of the reduction.
        comm_device_type: the type of the device that the group reduces on, by default the type of
            `device`.
    """

    def __init__(
        self,
        layout: AmaxLayout[Weight],
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
        comm_device_type: str | None = None,
    ) -> None:
        self._group = group
        # The type of the device to copy amaxes to for a reduction. None if the buffer is on it.
        self._comm_device_type = None if comm_device_type in (None, device.type) else comm_device_type
        self.offsets = layout.offsets
        self.flag_of = layout.flag_of
        self.shared = layout.shared
        self.buffer = torch.zeros(layout.size, dtype=dtype, device=device)
        self.flags = self._part(layout.flags)
        self._reduced = self._part(layout.reduced)
        self._maxima = self._part(layout.maxima)
        around_call = Span(0, layout.call.start), Span(layout.call.stop, layout.size)
        self._cleared = [self._part(span) for span in around_call if span.numel]
        bounds = layout.group_bounds
        self._grouped = self._part(Span(bounds[0], bounds[-1]))
        self._group_bounds = _index([bound - bounds[0] for bound in bounds], device)
        self._receivers = _index([place for place, _ in layout.receivers], device)
        self._received = _index([maximum for _, maximum in layout.receivers], device)
        self._sources, self._targets = (places.to(device) for places in layout.exchanged)

    def begin(self) -> None:
        """Zero the buffer before amaxes are measured, except the numbers of the call, which
        `CastReports.announce` has just written.
        """
        for part in self._cleared:
            part.zero_()

    def reduce(self) -> None:
        """Reduce the measured amaxes over the ranks, by one collective at most. `StepAmaxes` adds
        one over replicas.
        """
        # A rank without elements of any group enters the zeros that `begin` has written.
        if self._grouped.numel():
            self._maxima.copy_(torch.segment_reduce(self._grouped, "max", offsets=self._group_bounds, initial=0))
        if self._sources.numel():
            self.buffer[self._targets] = self.buffer[self._sources]
        if self._reduced.numel():
            self._reduce_part(self._reduced, self._group, "the packed amaxes of a cast")
        if self._receivers.numel():
            self.buffer[self._receivers] = self.buffer[self._received]
        if self._sources.numel():
            self.buffer[self._sources] = self.buffer[self._targets]

    def _reduce_part(self, part: Tensor, group: Group, what: str) -> None:
        """Take the maxima over the ranks of a group, on the device that it reduces on."""
        to_reduce = part if self._comm_device_type is None else part.to(self._comm_device_type)
        group.all_reduce_max(to_reduce, what)
        if to_reduce is not part:
            part.copy_(to_reduce)

    def _part(self, span: Span) -> Tensor:
        return self.buffer[span.start : span.stop]


def _index(places: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(places, dtype=torch.int64, device=device)


# -- the amaxes of a plan


@dataclass(frozen=True)
class SplitRows:
    """The block rows that boundaries between ranks split in one grid of a weight.

    Attributes:
        indices: i64, the indices of these block rows.
        height: the rows of elements in each.
        across: the number of amaxes in each.
    """

    indices: Tensor
    height: int
    across: int

    @property
    def numel(self) -> int:
        """The number of their amaxes."""
        return self.indices.numel() * self.across


def split_rows(fmt: FormatSpec, matrix: Block, cuts: range) -> list[SplitRows]:
    """Return the block rows that shard boundaries split in the rowwise grid, and in the columnwise
    grid of a format that has another.
    """
    rows, columns = matrix
    grids = [fmt.block, fmt.columnwise_block if fmt.columnwise is Columnwise.OWN_GRID else None]
    places = torch.tensor(cuts, dtype=torch.int64)
    divided = []
    for height, width in (block for block in grids if block):
        inside = places % (width if height == 1 else height * columns) != 0
        indices = torch.unique(places[inside] // (height * columns))
        divided.append(SplitRows(indices, height, amax_grid((height, width), rows, columns)[1]))
    return divided


@dataclass(frozen=True)
class BoundaryByte:
    """A byte of the weight `index` whose elements `element` and `element + 1` belong to two ranks,
    `owners` in that order.
    """

    index: int
    element: int
    owners: tuple[int, int]


def boundary_bytes(index: int, ownership: Ownership) -> Iterator[BoundaryByte]:
    """Yield the bytes of one weight that two ranks share."""
    if ownership.items[index].unit == 1:
        return
    for first, second in itertools.pairwise(ownership.pieces.get(index, ())):
        if first.stop == second.start and first.stop % 2:
            yield BoundaryByte(index, first.stop - 1, (first.rank, second.rank))


@dataclass(frozen=True)
class SplitBlocks:
    """The blocks and bytes of a plan's weights that a boundary between ranks splits, the same on
    all ranks.

    Attributes:
        rows: the block rows of each weight whose scales are gathered.
        bytes: the bytes of the other weights.
    """

    rows: dict[int, list[SplitRows]]
    bytes: list[BoundaryByte]

    @staticmethod
    def of(partition: Partition, indices: Sequence[int]) -> "SplitBlocks":
        """Find them for the weights at these `indices`."""
        rows: dict[int, list[SplitRows]] = {}
        shared_bytes: list[BoundaryByte] = []
        for index in indices:
            shard = partition.shards[index]
            if shard.cuts is None:
                shared_bytes += boundary_bytes(index, partition.ownership)
            else:
                rows[index] = split_rows(shard.weight.format, shard.weight.matrix_shape, shard.cuts)
        return SplitBlocks(rows, shared_bytes)


def layout_of_plan(
    shards: Sequence[MasterShard], indices: Sequence[int], cut: SplitBlocks, is_stepped: bool, compares_calls: bool
) -> AmaxLayout[int]:
    """Lay out the amaxes of the weights at these `indices`, as in the drawing at the top of this
    file.

    Args:
        shards: of all weights of a plan.
        indices: the indices of the weights that any rank has a master of.
        cut: the block rows and bytes of these weights that ranks share.
        is_stepped: True if casts take optimizer steps, so that every weight has a flag.
        compares_calls: True if there are several ranks, whose calls are compared where there are
            amaxes or flags to reduce.
    """
    layout = AmaxLayout[int]()
    counts = {index: _amax_counts(shards[index]) for index in indices}
    sharing = {index: (shards[index].weight.state.shared_amax, shards[index].weight.format) for index in indices}
    groups = groups_cast_together(sharing)
    with_amaxes = [index for index in indices if _has_amaxes(shards[index])]

    layout.place_groups(groups, counts)
    for index in indices:
        if index not in cut.rows and index not in layout.offsets:
            layout.place(index, counts[index])
    layout.place_maxima(groups)
    for index, place in layout.shared.items():
        # Two-level scales read the shared amax at its offset.
        if shards[index].weight.format.block is None:
            layout.receivers.append((layout.offsets[index][0], place))
    places_of_rows = {index: [layout.reserve(rows.numel) for rows in grids] for index, grids in cut.rows.items()}
    layout.boundary = layout.reserve(4 * len(cut.bytes))
    with_flags = indices if is_stepped else with_amaxes
    layout.place_flags(with_flags)
    layout.call = layout.reserve(2 if with_flags and compares_calls else 0)
    layout.reduced = Span(0, layout.size)

    for index, grids in cut.rows.items():
        if shards[index].span.numel:
            layout.place(index, counts[index])
            _reduce_split_rows(layout, index, shards[index], grids, places_of_rows[index])
    if len(with_amaxes) < len(indices):
        unread = layout.reserve(1).start
        layout.offsets |= {index: (unread, unread) for index in indices if not _has_amaxes(shards[index])}
    return layout


def _reduce_split_rows(
    layout: AmaxLayout[int], index: int, shard: MasterShard, grids: Sequence[SplitRows], places: Sequence[Span]
) -> None:
    """Reduce the amaxes of the shared block rows that this rank has a part of, at the offsets
    `places` of each grid.
    """
    columns = shard.weight.matrix_shape[1]
    for rows, first, place in zip(grids, layout.offsets[index], places, strict=False):
        unit = rows.height * columns
        is_here = (rows.indices * unit < shard.span.stop) & ((rows.indices + 1) * unit > shard.span.start)
        across = torch.arange(rows.across)
        own_rows = rows.indices[is_here] - shard.rows.start // rows.height
        sources = first + own_rows.view(-1, 1) * rows.across + across
        targets = place.start + is_here.nonzero() * rows.across + across
        layout.reduce_at(sources, targets)


def _has_amaxes(shard: MasterShard) -> bool:
    """Return True if the format has amaxes. All ranks agree on it, also those without elements."""
    return shard.weight.format.amax_policy is not AmaxPolicy.NONE


def _amax_counts(shard: MasterShard) -> tuple[int, int]:
    """Return the number of amaxes that this rank has of a weight, rowwise and columnwise."""
    if shard.cuts is None:
        return weight_amax_counts(shard.weight.format, shard.weight.shape)
    return amax_counts(shard.weight.format, shard.rows.numel, shard.weight.matrix_shape[1])


class PlanAmaxes(PackedAmaxes[int]):
    """The amaxes of a plan, by the index of a weight.

    Attributes:
        boundary: the elements next to odd boundaries. None without any.
        reports: the reports of the ranks on their call, and on masters that are not finite.
    """

    def __init__(
        self,
        partition: Partition,
        indices: Sequence[int],
        cut: SplitBlocks,
        layout: AmaxLayout[int],
        group: Group,
        names: Sequence[str],
        raises_together: bool,
    ) -> None:
        shards = partition.shards
        with_kept_amax = [index for index in indices if shards[index].weight.state.external_scaling_state]
        with_amaxes = [shards[index].weight for index in indices if _has_amaxes(shards[index])]
        # Amaxes that a framework keeps are FP32.
        is_bf16 = all(weight.dtype == torch.bfloat16 for weight in with_amaxes) and not with_kept_amax
        dtype = torch.bfloat16 if with_amaxes and is_bf16 else torch.float32
        super().__init__(layout, dtype, partition.device, group)
        self._with_kept_amax = [shards[index].weight for index in with_kept_amax]
        self._kept_places = _index([layout.offsets[index][0] for index in with_kept_amax], partition.device)
        self.boundary: BoundaryElements | None = None
        if cut.bytes:
            self.boundary = BoundaryElements(shards, cut.bytes, group.rank, self._part(layout.boundary))
        numbers = self._part(Span(layout.flags.start, layout.call.stop))
        self.reports = CastReports(group, numbers, [names[index] for index in layout.flag_of], raises_together)

    def reduce(self) -> None:
        """Reduce the measured amaxes over the ranks, with the amaxes that frameworks keep, as they
        have grown so far, and the elements next to odd boundaries.
        """
        if self._with_kept_amax:
            kept_amaxes = torch.cat([weight.amax for weight in self._with_kept_amax if weight.amax is not None])
            self.buffer[self._kept_places] = self.buffer[self._kept_places].maximum(kept_amaxes)
        if self.boundary:
            self.boundary.enter()
        super().reduce()
        self.reports.after_reduction()
        if self.boundary:
            self.boundary.leave()

    def refuse(self, problem: Exception) -> None:
        """Take part in the reduction of a cast that this rank cannot make, so that the others do
        not wait for it. On a CPU all ranks raise the problem here; on a GPU the others raise it at
        their next cast.
        """
        self.begin()
        self.reports.refuse(problem)
        self._group.all_reduce_max(self._reduced, "the packed amaxes of a cast")
        self.reports.after_reduction()
        self.reports.send()


class BoundaryElements:
    """The elements next to odd shard boundaries of 4-bit codes. Two ranks share such a byte, and
    both write the full byte, so each needs the other's element.

    Attributes:
        others: (weight, element, slot) of the elements of other ranks that this rank writes next to
            its own.
        received: f32, these elements by slot after a reduction.

    Args:
        shards: of all weights of a plan.
        shared_bytes: the bytes that two ranks share.
        rank: this rank.
        numbers: the part of the buffer for these elements. First the two elements of each byte,
            which are -Inf on ranks that do not own them, then a flag for each element, 1 if it is
            NaN.
    """

    def __init__(
        self, shards: Sequence[MasterShard], shared_bytes: Sequence[BoundaryByte], rank: int, numbers: Tensor
    ) -> None:
        self._values, self._is_nan = numbers.view(2, -1)
        self._shards = shards
        self._own: list[tuple[int, int, int]] = []
        self.others: list[tuple[int, int, int]] = []
        self.received = torch.zeros(2 * len(shared_bytes), dtype=torch.float32, device=numbers.device)
        for number, byte in enumerate(shared_bytes):
            for side, owner in enumerate(byte.owners):
                element = byte.index, byte.element + side, 2 * number + side
                if owner == rank:
                    self._own.append(element)
                elif byte.owners[1 - side] == rank:
                    self.others.append(element)

    def enter(self) -> None:
        """Send the elements that this rank owns, rounded to the nominal dtype."""
        self._values.fill_(-torch.inf)
        for index, element, slot in self._own:
            shard = self._shards[index]
            assert shard.master is not None
            value = shard.master.detach()[element - shard.span.start].to(shard.weight.dtype)
            is_nan = value.isnan()
            self._values[slot] = value.masked_fill(is_nan, -torch.inf)
            self._is_nan[slot] = is_nan

    def leave(self) -> None:
        """Take the elements of other ranks."""
        if self.others:
            self.received.copy_(self._values.float().masked_fill_(self._is_nan > 0, torch.nan))
