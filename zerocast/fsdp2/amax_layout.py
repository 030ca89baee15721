"""StepAmaxes: the amaxes of weights under FSDP2, and the part of them that ranks reduce.

Each rank has the amaxes of the block rows that it touches. Only the tensor amaxes and the block
rows that a boundary between shards splits concern other ranks. The flags of weights concern them
where other ranks have other slices of tensor parallelism, or are of another replica (HSDP).

Replicas (HSDP) hold equal masters and share no gather, so a rank does not see their headers. A cast
that all ranks make therefore also reduces two things over the replicas: flags of ranks that could
not cast, and a count of casts. After masters were written, a replica may have cast alone; it counts
these casts since the last one of all ranks. If the counts of replicas differ, all ranks raise.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.cast.amaxes import AmaxLayout, PackedAmaxes
from zerocast.distributed.group import ONE_PROCESS, Group
from zerocast.formats import ScaleRule
from zerocast.formats.layout import Span
from zerocast.formats.shared_amax import groups_cast_together
from zerocast.fsdp2.weight import FSDPWeight

# The flags of weights that a cast leaves on a rank. They are also columns of
# `CastGroup._statuses_by_flag`.
NOT_FINITE_FLAG, REFUSED_FLAG, REPLICAS_DIFFER_FLAG = 1, 2, 3

# The largest number of casts that a replica reports to have made by itself. The buffer may be bf16.
MAX_REPLICA_ONLY_CASTS = 256


@dataclass(frozen=True)
class ReductionGroup:
    """The `group` that amaxes are reduced over, on devices of type `device`.

    Tensor parallelism makes `tp_size` slices of a weight, of which this rank has a shard of slice
    `tp_rank`. No rank has shards of two slices. The slices share the amax of the tensor, and no
    block spans two of them. `replicas` are the ranks that have the same masters as this one.
    """

    group: Group
    device: str
    tp_rank: int
    tp_size: int
    replicas: Group = ONE_PROCESS


def layout_of_shards(weights: Sequence[FSDPWeight], reduction: ReductionGroup) -> AmaxLayout[str]:
    """Lay out the amaxes of the weights, keyed by name: own amaxes, flags, and reduced amaxes.

    The reduced ones are the largest amaxes of groups, amaxes of single tensors, and the block rows
    that a boundary splits. A weight with two-level scales that shares its amax with no other is a
    group by itself: its tensor amax is the largest of its block amaxes on all ranks.
    """
    layout = AmaxLayout[str]()
    counts = {weight.name: weight.geometry.amax_counts for weight in weights}
    groups = groups_cast_together({weight.name: (weight.shared_amax, weight.format) for weight in weights})
    sharing = {name for group in groups for name in group}
    has_two_levels = [weight.name for weight in weights if weight.format.scale_rule is ScaleRule.TWO_LEVEL]
    groups += [[name] for name in has_two_levels if name not in sharing]

    layout.place_groups(groups, counts)
    for weight in weights:
        if weight.name not in layout.offsets:
            layout.place(weight.name, counts[weight.name])
    layout.place_flags([weight.name for weight in weights])
    layout.call = layout.reserve(2 if reduction.replicas.size > 1 else 0)
    first = layout.size
    if reduction.tp_size > 1:
        # Ranks of one slice get the flags of each other in headers, and the flags of other slices
        # here.
        layout.reduce_span_at(layout.flags, layout.reserve(len(weights)))
    layout.place_maxima(groups)
    for weight in weights:
        # Two-level scales read the reduced amax at its offset, other scales where their own is.
        if weight.geometry.has_tensor_amax and weight.format.block is None:
            own_amax = layout.offsets[weight.name][0]
            if weight.name in layout.shared:
                layout.receivers.append((own_amax, layout.shared[weight.name]))
            else:
                layout.reduce_span_at(Span(own_amax, own_amax + 1), layout.reserve(1))
        _reduce_split_rows(layout, weight, reduction)
    layout.reduced = Span(first, layout.size)
    return layout


def _reduce_split_rows(layout: AmaxLayout[str], weight: FSDPWeight, reduction: ReductionGroup) -> None:
    """Reduce the block rows that a boundary between shards splits and that this rank holds elements
    of.
    """
    geometry = weight.geometry
    for grid in geometry.amax_grids():
        split_rows = geometry.scale_shards.cut(grid.height)
        # Each slice of tensor parallelism reduces its block rows at separate offsets.
        slice_numel = len(split_rows) * grid.row_numel
        all_slices = layout.reserve(reduction.tp_size * slice_numel)
        own_slice = all_slices.start + reduction.tp_rank * slice_numel
        touched = geometry.scale_shards.touched(geometry.rank, grid.height)
        first_block_row = geometry.first_row // grid.height
        for index in range(bisect_left(split_rows, touched.start), bisect_left(split_rows, touched.stop)):
            amaxes = grid.row(split_rows[index] - first_block_row)
            source = layout.offsets[weight.name][0] + amaxes.start
            target = own_slice + index * grid.row_numel
            layout.reduce_span_at(Span(source, source + amaxes.numel), Span(target, target + amaxes.numel))


class StepAmaxes(PackedAmaxes[str]):
    """The amaxes of some weights, keyed by name, which optimizer steps may leave for the next cast.

    Attributes:
        measured: the weights whose amaxes an optimizer step has left in the buffer. They hold until
            something else writes to the masters.
        is_refused: True during a cast that this rank cannot make, or whose masters are partial.
        replica_only_casts: the number of casts that this replica has made without the others since
            the last cast of all replicas. None during such a cast.
    """

    def __init__(self, weights: Sequence[FSDPWeight], reduction: ReductionGroup) -> None:
        nominal = {weight.geometry.nominal for weight in weights}
        dtype = torch.bfloat16 if nominal == {torch.bfloat16} else torch.float32
        layout = layout_of_shards(weights, reduction)
        super().__init__(layout, dtype, weights[0].master.device, reduction.group, reduction.device)
        self._replicas = reduction.replicas
        # The number of replica-only casts of this replica and its negative, of which a reduction
        # leaves the largest and the negative of the smallest.
        self._casts_range = self._part(layout.call)
        # The flags followed by these two numbers.
        self._of_replicas = self._part(Span(layout.flags.start, layout.call.stop))
        self.measured, self._coded = frozenset[str](), frozenset[str]()
        self.is_refused = False
        self.replica_only_casts: int | None = 0

    @property
    def coded(self) -> frozenset[str]:
        """The measured weights whose codes the step has written too, except in block rows that a
        boundary splits.
        """
        return self._coded & self.measured

    def begin_step(self, names: frozenset[str], coded: frozenset[str]) -> Tensor:
        """Return the buffer for a step that leaves the amaxes of these weights there, and writes
        the codes of those that are `coded`.
        """
        if not self.measured or self.measured & names:
            self.buffer.zero_()
            self.measured = frozenset()
        self._coded = self.coded | coded
        self.measured |= names
        return self.buffer

    def reduce(self) -> None:
        """Reduce amaxes and flags over the ranks that hold parts of these weights, then flags over
        replicas.
        """
        if self.is_refused:
            self.flags.fill_(REFUSED_FLAG)
        super().reduce()
        if self._replicas.size > 1 and self.replica_only_casts is not None:
            count = min(self.replica_only_casts, MAX_REPLICA_ONLY_CASTS)
            # This writes both numbers in one launch.
            torch.linspace(count, -count, 2, out=self._casts_range)
            self._reduce_part(self._of_replicas, self._replicas, "the reports of replicas on a cast")
            # The sum of the two is the difference between replicas. It stays on the device.
            differ = (self._casts_range.sum() != 0).to(self.flags.dtype)
            self.flags.copy_(self.flags.maximum(REPLICAS_DIFFER_FLAG * differ))

    def begin(self) -> None:
        """Put zeros where amaxes are about to be measured or reduced. Amaxes that steps have
        measured stay for this cast only. If the cast raises, the next one measures all masters.
        """
        if self.measured:
            self._reduced.zero_()
        else:
            super().begin()
        self.measured = frozenset()
