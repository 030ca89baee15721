"""AmaxGroup: the weights whose amaxes are reduced together, and their cast: one all-reduce, whatever their number and formats.

Each rank has the amaxes of the block rows that it touches. Of these only the tensor amaxes and the block rows that a boundary
between shards cuts concern other ranks: they are packed, reduced, and put back. If there are none, nothing is sent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast import backends
from zerocast.cast.partition import MasterShard
from zerocast.cast.weight_table import WeightTable, WeightTables
from zerocast.distributed.group import Group
from zerocast.fsdp2.delayed import DelayedShards
from zerocast.fsdp2.shard_weight import ShardWeight
from zerocast.fsdp2.stack import Stack, by_geometry

MOST_TABLES = 8  # kept for sets of weights that steps have not measured; which experts learn may change with every step


@dataclass(frozen=True)
class Reduction:
    """The `group` that amaxes are reduced over, on devices of type `device`.

    Tensor parallelism makes slices of a weight, each sharded by ranks of its own: `lane` of `lanes`. They share the amax of the
    tensor and no block row.
    """

    group: Group
    device: str
    lane: int
    lanes: int


class AmaxGroup:
    """Weights with one reduction, the same list on every rank, all on one device.

    `measured` names the weights whose amaxes an optimizer step has left in the packed buffer, up to date until somebody writes.
    """

    def __init__(self, weights: Sequence[ShardWeight], reduction: Reduction) -> None:
        self.weights, self.reduction = weights, reduction
        self.measured: frozenset[str] = frozenset()
        device = weights[0].master.device
        self.backend = backends.choose(device)
        self.delayed = DelayedShards([weight.delayed for weight in weights if weight.delayed], device)
        self.places = self._places()
        self._shards: dict[str, MasterShard] = {}
        self._headers: list[tuple[int, Tensor]] = []  # int32 `[weights, 2]` of weights of one geometry
        copies = []
        classes = by_geometry(weights)
        sizes = [len(members) * members[0].wire.nbytes for members in classes]
        self.sent = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        for members, part in zip(classes, self.sent.split(sizes), strict=True):
            stack = Stack(members, part.view(len(members), -1))
            self._shards |= {w.name: shard for w, shard in zip(members, stack.shards, strict=True) if w.takes_part}
            copies += stack.copies
            self._headers += [(members[0].says, header) for header in members[0].wire.headers(stack.sent)]
        self._targets, self._sources = [target for target, _ in copies], [source for _, source in copies]
        self._batches = self._batch(list(self._shards))
        self._unmeasured: dict[frozenset[str], list[WeightTable]] = {frozenset(): self._batches}
        self._pack(self.places, device)

    def _batch(self, names: Iterable[str]) -> list[WeightTable]:
        batches = WeightTables(self.weights[0].master.device, self.backend)
        for name in names:
            batches.of(self._shards[name].weight).add_shard(self._shards[name], self.places[name])
        return batches.freeze()

    def _places(self) -> dict[str, tuple[int, int]]:
        """Where the amaxes of each weight begin in the packed buffer: first those with a ghost row, one behind another."""
        places, size = {}, 0
        for weight in sorted(self.weights, key=lambda weight: not weight.has_ghost):
            rowwise, columnwise = weight.amaxes
            places[weight.name] = (size, size + rowwise)
            size += rowwise + columnwise
        self._size = size
        return places

    def _pack(self, places: dict[str, tuple[int, int]], device: torch.device) -> None:
        """Buffers, and which amax goes where among the reduced ones."""
        nominal = {weight.nominal for weight in self.weights}
        dtype = torch.bfloat16 if nominal == {torch.bfloat16} else torch.float32
        lane, lanes = self.reduction.lane, self.reduction.lanes
        here, there, size = [], [], 0  # amaxes that are reduced as they are
        segments, ghosts, maxima = [0], [], []  # tensor amaxes that are the largest of a segment
        for weight in self.weights:
            first, count = places[weight.name][0], weight.amaxes[0]
            if weight.has_ghost:
                segments.append(first + count)
                ghosts.append(first + count - weight.grids()[0][1])
                maxima.append(size)
            elif weight.has_tensor_slot:
                here.append(torch.tensor([first]))
                there.append(torch.tensor([size]))
            size += weight.has_tensor_slot
            for height, across, offset in weight.grids():
                touched = weight.shards.touched(weight.rank, height)
                for index, block in enumerate(weight.shards.cut(height)):
                    if touched.start <= block < touched.stop:
                        row = block - weight.first_row // height
                        here.append(torch.arange(across) + first + offset + row * across)
                        there.append(
                            torch.arange(across) + size + (lane * len(weight.shards.cut(height)) + index) * across
                        )
                size += lanes * len(weight.shards.cut(height)) * across
        none = [torch.empty(0, dtype=torch.int64)]
        self._here, self._there = torch.cat(here + none).to(device), torch.cat(there + none).to(device)
        self._segments = torch.tensor(segments, dtype=torch.int64, device=device)
        self._ghosts, self._maxima = (torch.tensor(x, dtype=torch.int64, device=device) for x in (ghosts, maxima))
        self._packed = torch.zeros(self._size, dtype=dtype, device=device)
        self.reduced = torch.zeros(size, dtype=dtype, device=device)

    def measuring(self, names: frozenset[str]) -> Tensor:
        """The packed buffer, for a step that leaves the amaxes of these weights there; `places` says where."""
        if not self.measured or self.measured & names:
            self._packed.zero_()
            self.measured = frozenset()
        self.measured |= names
        return self._packed

    @torch.no_grad()
    def cast(self, repeat: bool) -> None:
        """Cast the masters as they are now into the bytes to send; with `repeat` by the delayed scales of the last cast."""
        self._measure_the_rest()
        if self.reduced.numel():
            self._reduce()
        with self.delayed.cast(repeat):
            for batch in self._batches:
                batch.compute_scales(self._packed, None)
            for batch in self._batches:
                batch.partial_cast(self._packed, None)
                if not repeat:
                    batch.roll_history(None)
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)

    def stamp(self, generation: int) -> None:
        """Write the headers of a cast; as arguments of kernels the numbers travel to a GPU without a wait."""
        for said, header in self._headers:
            header[:, 0].fill_(said)
            header[:, 1].fill_(generation)

    def _measure_the_rest(self) -> None:
        """Amaxes of the masters that no step has measured."""
        measured, self.measured = self.measured, frozenset()
        if not measured:
            self._packed.zero_()
        if measured not in self._unmeasured:
            if len(self._unmeasured) > MOST_TABLES:
                self._unmeasured = {frozenset(): self._batches}
            self._unmeasured[measured] = self._batch(name for name in self._shards if name not in measured)
        for batch in self._unmeasured[measured]:
            batch.partial_amax(self._packed)

    def _reduce(self) -> None:
        """The one collective of a cast."""
        self.reduced.zero_()
        self.reduced[self._there] = self._packed[self._here]
        if self._ghosts.numel():
            amaxes = self._packed[: self._segments[-1]]
            self.reduced[self._maxima] = torch.segment_reduce(amaxes, "max", offsets=self._segments, initial=0)
        on_wire = self.reduced.to(self.reduction.device)
        self.reduction.group.all_reduce_max(on_wire, "the amaxes of a cast")
        if on_wire is not self.reduced:
            self.reduced.copy_(on_wire)
        self._packed[self._here] = self.reduced[self._there]
        if self._ghosts.numel():
            self._packed[self._ghosts] = self.reduced[self._maxima]
