"""PackedAmax: every amax of every weight of every format in one buffer, reduced once.

MAX is exact, and an amax of bf16-rounded elements is exact in bf16, so the buffer is bf16 when
every nominal dtype is, else FP32. The NVFP4 tensor amax is the maximum of the reduced block amaxes
and needs no collective of its own.

Behind the amaxes ride the elements next to odd NVFP4 cuts: two owners share that byte and both
write the whole of it, so each needs the other's element. Non-owners send -Inf. A NaN never enters a
MAX; it is sent as a flag.

Where a host keeps the amax history of a weight, its amax grows until the host takes it: what is
there on any rank goes into the same reduction. Last come two numbers by which ranks that are in
different calls find out (`SameCall`).
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
from zerocast.formats.layout import amax_counts


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
    if ownership.items[index].elements_per_byte == 1:
        return
    for first, second in itertools.pairwise(ownership.pieces.get(index, ())):
        if first.stop == second.start and first.stop % 2:
            yield BoundaryByte(index, first.stop - 1, (first.rank, second.rank))


class PackedAmax(AmaxReduction):
    """The buffer, the place of each weight's amaxes in it (`offsets`), the boundary bytes behind
    them, and `same_call`.

    `boundary_elements` are (weight, element, slot) of the elements of other ranks that this rank
    writes beside its own; `received` holds them after a reduction, f32 by slot.
    """

    def __init__(self, partition: Partition, cast: Sequence[int], device: torch.device, group: Group) -> None:
        self._shards, self._group = partition.shards, group
        self.offsets: dict[int, tuple[int, int]] = {}
        self.boundary_bytes: list[BoundaryByte] = []
        self._external = [index for index in cast if self._shards[index].weight.state.external_scaling_state]
        size, dtypes = 0, set()
        for index in cast:
            weight = self._shards[index].weight
            rowwise, columnwise = amax_counts(weight.format, *weight.matrix_shape)
            self.offsets[index] = (size, size + rowwise)
            size += rowwise + columnwise
            if rowwise:
                dtypes.add(torch.float32 if index in self._external else weight.dtype)
            self.boundary_bytes += boundary_bytes(index, partition.ownership)
        dtype = torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32
        numel = size + 4 * len(self.boundary_bytes)
        has_slots = bool(numel) and group.size > 1
        self.buffer = torch.zeros(numel + 2 * has_slots, dtype=dtype, device=device)
        self.same_call = SameCall(group, self.buffer[numel:]) if has_slots else None
        self._cast = self.buffer[:numel]  # what a cast begins with zeros in
        self._values, self._is_nan = self.buffer[size:numel].view(2, -1)
        self.received = torch.zeros(2 * len(self.boundary_bytes), dtype=torch.float32, device=device)
        self.boundary_elements = [
            (byte.index, byte.element + side, 2 * slot + side)
            for slot, byte in enumerate(self.boundary_bytes)
            for side in (0, 1)
            if byte.owners[1 - side] == group.rank
        ]
        self._external_slots = torch.tensor([self.offsets[index][0] for index in self._external], device=device)

    def begin(self) -> None:
        """Forget the amaxes of the last cast."""
        self._cast.zero_()
        if self.boundary_bytes:
            self._values.fill_(-torch.inf)

    def reduce(self) -> None:
        """The one collective of a cast."""
        self._put_external()
        self._put_boundary()
        if self.buffer.numel():
            self._group.all_reduce_max(self.buffer, "the packed amaxes of a cast")
        if self.same_call:
            self.same_call.reduced()
        if self.boundary_elements:
            self.received.copy_(self._values.float().masked_fill_(self._is_nan > 0, torch.nan))

    def _put_boundary(self) -> None:
        """Enter this rank's elements of the boundary bytes, rounded to the nominal dtype."""
        for slot, byte in enumerate(self.boundary_bytes):
            for side, owner in enumerate(byte.owners):
                if owner == self._group.rank:
                    value = _element(self._shards[byte.index], byte.element + side)
                    nan = value.isnan()
                    self._values[2 * slot + side] = value.masked_fill(nan, -torch.inf)
                    self._is_nan[2 * slot + side] = nan

    def _put_external(self) -> None:
        """Enter the amaxes that hosts keep, as they have grown so far."""
        if self._external:
            amaxes = [self._shards[index].weight.amax for index in self._external]
            grown = torch.cat([amax for amax in amaxes if amax is not None])
            self.buffer[self._external_slots] = self.buffer[self._external_slots].maximum(grown)


def _element(shard: MasterShard, element: int) -> Tensor:
    assert shard.master is not None
    return shard.master.detach()[element - shard.span.start].to(shard.weight.dtype)
