"""BoundaryAmaxes: the amaxes of FSDP2's weights, and the one all-reduce of a cast, whatever their
formats.

Each rank has the amaxes of the block rows that it touches. Of these only the tensor amaxes and the
block rows that a boundary between shards cuts concern other ranks: they are packed, reduced, and
put back. If there are none, nothing is sent.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.cast.partition import MasterShard
from zerocast.cast.pipeline import AmaxReduction
from zerocast.distributed.group import Group
from zerocast.formats.shared_amax import SharedAmax, groups_cast_together
from zerocast.fsdp2.weight import FSDPWeight


@dataclass(frozen=True)
class ReductionGroup:
    """The `group` that amaxes are reduced over, on devices of type `device`.

    Tensor parallelism makes `tp_size` slices of a weight, each sharded by ranks of its own; this
    rank has slice `tp_rank`. Slices share the amax of the tensor and no block row.
    """

    group: Group
    device: str
    tp_rank: int
    tp_size: int


class BoundaryAmaxes(AmaxReduction):
    """The amaxes of `weights`, and their reduction. `buffer` holds those of this rank, `offsets`
    says which where. Behind them, in the order of `weights`, are `flags`, which are 1 for masters
    of this rank that are NaN or Inf (`flag_of`).

    `measured` names the weights whose amaxes an optimizer step has left in the buffer, up to date
    until somebody writes. `coded` names those of them whose codes it has written too, except of the
    block rows that a boundary cuts.
    """

    def __init__(self, weights: Sequence[FSDPWeight], reduction: ReductionGroup) -> None:
        self._reduction, self.measured, self._coded = reduction, frozenset[str](), frozenset[str]()
        self.offsets: dict[str, tuple[int, int]] = {}
        self.shards: Mapping[str, MasterShard] = {}  # once they are bound
        size = 0
        # one behind another
        for weight in sorted(weights, key=lambda weight: not weight.geometry.has_ghost):
            rowwise, columnwise = weight.geometry.amax_counts
            self.offsets[weight.name] = (size, size + rowwise)
            size += rowwise + columnwise
        nominal = {weight.geometry.nominal for weight in weights}
        dtype = torch.bfloat16 if nominal == {torch.bfloat16} else torch.float32
        device = weights[0].master.device
        self.flag_of = {weight.name: size + index for index, weight in enumerate(weights)}
        self.buffer = torch.zeros(size + len(weights), dtype=dtype, device=device)
        self.flags = self.buffer[size:]
        self._index(weights, device)

    def _index(self, weights: Sequence[FSDPWeight], device: torch.device) -> None:
        """Which amax goes where among the reduced ones."""
        here, there, size = [], [], 0  # amaxes that are reduced as they are
        # tensor amaxes that are the largest of a segment, and who has them
        segments, maxima, ghosts, owners = [0], [], [], []
        shared: dict[SharedAmax, int] = {}
        groups_cast_together({weight.name: (weight.shared_amax, weight.format) for weight in weights})
        for weight in weights:
            geometry = weight.geometry
            place = shared.get(weight.shared_amax, size) if weight.shared_amax else size
            if weight.shared_amax and geometry.has_tensor_amax:
                shared[weight.shared_amax] = place
            first, held = self.offsets[weight.name][0], geometry.tensor_amaxes
            if geometry.has_ghost:
                segments.append(first + sum(geometry.amax_counts))
                maxima.append(place)
                ghosts += [first + index for index in held]
                owners += [place] * len(held)
            elif held:
                here.append(torch.tensor(held) + first)
                there.append(torch.full((len(held),), place))
            size += geometry.has_tensor_amax and place == size
            for height, across, offset in geometry.grids():
                touched, cut = geometry.shards.touched(geometry.rank, height), geometry.shards.cut(height)
                begin = size + self._reduction.tp_rank * len(cut) * across
                counts = geometry.amax_counts
                end = counts[0] if offset < counts[0] else sum(counts)
                for index in range(bisect_left(cut, touched.start), bisect_left(cut, touched.stop)):
                    row = cut[index] - geometry.first_row // height
                    amaxes = torch.arange(min(across, end - offset - row * across))
                    here.append(amaxes + first + offset + row * across)
                    there.append(amaxes + begin + index * across)
                size += self._reduction.tp_size * len(cut) * across
        self._is_shared = bool(shared)
        none = [torch.empty(0, dtype=torch.int64)]
        self._here, self._there = torch.cat(here + none).to(device), torch.cat(there + none).to(device)
        self._in_segments = segments[-1]  # amaxes
        self._segments = torch.tensor(segments, dtype=torch.int64, device=device)
        indices = (torch.tensor(x, dtype=torch.int64, device=device) for x in (maxima, ghosts, owners))
        self._maxima, self._ghosts, self._owners = indices
        self._reduced = torch.zeros(size, dtype=self.buffer.dtype, device=device)

    @property
    def coded(self) -> frozenset[str]:
        """The measured weights whose codes are written."""
        return self._coded & self.measured

    def begin_step(self, names: frozenset[str], coded: frozenset[str]) -> Tensor:
        """The buffer, for a step that leaves the amaxes of these weights there, and writes the
        codes of those that are `coded`; `offsets` says where.
        """
        if not self.measured or self.measured & names:
            self.buffer.zero_()
            self.measured = frozenset()
        self._coded = self.coded | coded
        self.measured |= names
        return self.buffer

    def begin(self) -> None:
        """Leave the amaxes that steps have measured, for this cast: one that raises measures all
        again.
        """
        if not self.measured:
            self.buffer.zero_()
        self.measured = frozenset()

    def reduce(self) -> None:
        """The one collective of a cast."""
        if not self._reduced.numel():
            return
        self._reduced.zero_()
        self._enter(self._there, self.buffer[self._here])
        if self._ghosts.numel():
            amaxes = self.buffer[: self._in_segments]
            self._enter(self._maxima, torch.segment_reduce(amaxes, "max", offsets=self._segments, initial=0))
        on_wire = self._reduced.to(self._reduction.device)
        self._reduction.group.all_reduce_max(on_wire, "the amaxes of a cast")
        if on_wire is not self._reduced:
            self._reduced.copy_(on_wire)
        self.buffer[self._here] = self._reduced[self._there]
        if self._ghosts.numel():
            self.buffer[self._ghosts] = self._reduced[self._owners]

    def _enter(self, places: Tensor, amaxes: Tensor) -> None:
        """Put amaxes among the reduced ones, several into the place that weights share."""
        if self._is_shared:
            self._reduced.scatter_reduce_(0, places, amaxes, "amax")
        else:
            self._reduced[places] = amaxes
