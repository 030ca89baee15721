"""CastGroup: the cast of weights whose amaxes are reduced together, in the steps of every host
(`zerocast.cast.pipeline`), into the bytes that they send.

The layers of a model repeat their shapes. Where those are sharded alike, the bytes to send lie at
equal distances and so do the scale buffers that the stages fill: one strided copy takes the scales
of all of them from one to the other.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zerocast import backends
from zerocast.cast.delayed_scaling import DelayedScaling
from zerocast.cast.partition import MasterShard
from zerocast.cast.pipeline import cast
from zerocast.cast.tables import WeightTable, WeightTables
from zerocast.distributed.rank_report import ShardStatus
from zerocast.formats import AmaxPolicy, layout
from zerocast.formats.layout import ALLOCATION_ALIGNMENT_BYTES, Buffer, round_up
from zerocast.fsdp2.amax_layout import ReductionGroup, StepAmaxes
from zerocast.fsdp2.gather_cast import GatherCast
from zerocast.fsdp2.gather_layout import JointLayout
from zerocast.fsdp2.weight import FSDPWeight

# kept for sets of weights that steps have not measured; which experts learn may change with every
# step
MOST_TABLES = 8


class CastGroup:
    """Weights with one reduction, the same list on every rank, all on one device, and the bytes
    that they send: with `keep_codes` a cast makes all of them, else `gather_casts` make the codes.
    """

    def __init__(self, weights: Sequence[FSDPWeight], reduction: ReductionGroup, keep_codes: bool) -> None:
        self.weights, self.amaxes, self.keep_codes = weights, StepAmaxes(weights, reduction), keep_codes
        self._device = weights[0].master.device
        self._backend = backends.choose(self._device)
        self._delayed_buffers = _delayed_buffers(weights, self._device)
        self.delayed = DelayedScaling(self._delayed_buffers, self._device, unseeded=self._delayed_buffers)
        self.delayed.load_state_dict(_seeded_state(weights))
        self.shards: dict[str, MasterShard] = {}
        # (in a side channel, of the stages): scales of owned block rows
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._holds_scales = False
        alike = _alike(_gathered_together(weights))
        sizes = [len(gathers) * _kept_bytes(gathers[0]) for gathers in alike]
        sent = torch.zeros(sum(sizes), dtype=torch.uint8, device=self._device)
        shapes = [
            spec for gathers in alike for stack in zip(*gathers, strict=True) for _, spec in _scale_buffers(stack)
        ]
        # in the layout of the stages; there during a cast unless they are held
        self._scales, scales = _side_by_side(shapes, self._device)
        for gathers, part in zip(alike, sent.split(sizes), strict=True):
            self._lay_out(gathers, part.view(len(gathers), -1), scales)
        # headers to be sent, int32 `[headers, 2]`, and where in `_sent` their halves are
        statuses = [weight.status_after_cast for weight in weights]
        self._statuses = torch.tensor(statuses, dtype=torch.int32).to(self._device)  # of finite masters
        self._headers = torch.stack([self._statuses, torch.zeros_like(self._statuses)], 1)
        places = [weight.header.storage_offset() + half for weight in weights for half in (0, 1)]
        self._header_places = torch.tensor(places, dtype=torch.int64).to(self._device)
        self._sent = sent.view(torch.int32)
        self._targets, self._sources = [target for target, _ in self._copies], [source for _, source in self._copies]
        self._tables = self._tables_of(self.shards)
        self._without: dict[frozenset[str], list[WeightTable]] = {frozenset(): self._tables}
        self._cut_rows: dict[frozenset[str], list[WeightTable]] = {frozenset(): []}
        self._in_graphs = self._without.copy(), self._cut_rows.copy()
        for weight in weights:
            weight.scaling = self.delayed if weight.name in self._delayed_buffers else None
        self.gather_casts = [] if keep_codes else list(map(self._gather_cast, _by_gather(weights)))
        self._free_scales()

    def _lay_out(self, gathers: Sequence[list[FSDPWeight]], sent: Tensor, scales: Iterator[Tensor]) -> None:
        """Lay out gathers that are alike side by side, over zero bytes `sent`
        `[gathers, bytes]`, and the next `scales`.
        """
        first = gathers[0]
        joint = first[0].joint
        sides = [side for _, side in joint.parts(sent)] if joint else [first[0].layout.parts(sent)[1]]
        for weights, of_each in zip(zip(*gathers, strict=True), sides, strict=True):
            self._stack(weights, sent, of_each, {name: next(scales) for name, _ in _scale_buffers(weights)})

    def _stack(self, weights: Sequence[FSDPWeight], sent: Tensor, side: Tensor, scales: Mapping[str, Tensor]) -> None:
        """Lay out weights of one geometry, which send their parts of `sent` and have the side
        channels `side`, `[weights, bytes]`, and the scale buffers `scales`.
        """
        first, geometry = weights[0], weights[0].geometry
        for index, weight in enumerate(weights):
            own = {name: buffer[index] for name, buffer in scales.items()}
            shard = weight.bind(sent[index], own | self._delayed_buffers.get(weight.name, {}))
            if geometry.takes_part:
                self.shards[weight.name] = shard
        if geometry.takes_part:
            self._copies += first.layout.outgoing_scales(side, scales)

    def _gather_cast(self, weights: Sequence[FSDPWeight]) -> GatherCast:
        layouts = {weight.name: weight.layout for weight in weights}
        found = GatherCast(layouts, self.shards, self.amaxes.offsets, self.amaxes.buffer, self.delayed, self._backend)
        for weight in weights:
            weight.gather_cast = found
        return found

    def _tables_of(
        self, shards: Mapping[str, MasterShard], measured: frozenset[str] = frozenset()
    ) -> list[WeightTable]:
        """Tables of the weights in `shards` without those that a step has measured."""
        tables = WeightTables(self._device, self._backend)
        for name, shard in shards.items():
            if name not in measured:
                tables.of(shard.weight).add_shard(shard, self.amaxes.offsets[name], flag=self.amaxes.flag_of[name])
        return tables.freeze()

    @torch.no_grad()
    def cast(self, repeat: bool) -> None:
        """Cast the masters as they are now into the bytes to send, of codes only those that are
        kept; with `repeat` by the delayed scales of the last cast.
        """
        self._allocate_scales()  # which tables that are built now are checked against
        coded = self.amaxes.coded if self.keep_codes else frozenset[str]()
        unmeasured = self._tables_without(self.amaxes.measured)
        codes = [*self._tables_without(coded), *self._cut_rows_of(coded)] if self.keep_codes else ()
        try:
            cast(
                self._tables,
                self.amaxes,
                self.delayed,
                unmeasured=unmeasured,
                codes=codes,
                repeat=repeat,
            )
            if self._targets:
                torch._foreach_copy_(self._targets, self._sources)
        finally:
            self._free_scales()

    def kept_codes(self, name: str) -> Tensor:
        """The codes that are kept of a weight with one set of them, from its first element here."""
        codes = self.shards[name].shard_data
        assert isinstance(codes, Tensor), name
        return codes

    def hold_scales(self) -> None:
        """Leave what a cast works in where it is: a graph is going to hold its address."""
        self._holds_scales = True
        self._allocate_scales()

    def hold_tables(self) -> None:
        """Keep those of the coming cast as long as this group: a graph is going to hold their
        addresses.
        """
        self._allocate_scales()
        without, cut_rows = self._in_graphs
        measured, coded = self.amaxes.measured, self.amaxes.coded
        without |= {names: self._tables_without(names) for names in (measured, coded)}
        cut_rows[coded] = self._cut_rows_of(coded)

    def _allocate_scales(self) -> None:
        storage = self._scales.untyped_storage()
        if storage.nbytes() != self._scales.nbytes:
            storage.resize_(self._scales.nbytes)

    def _free_scales(self) -> None:
        if not self._holds_scales:
            self._scales.untyped_storage().resize_(0)

    def hold_codes(self) -> None:
        """Keep the codes of the masters as they are now, by the scales of the last cast. The host
        waits for a GPU once, since gathers to come run on another stream.
        """
        for gather_cast in self.gather_casts:
            gather_cast.hold()
        if self.gather_casts:
            self.synchronize()

    def synchronize(self) -> None:
        """Wait for what was issued on this stream, where another one is to read it."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def stamp(self, generation: int | None) -> None:
        """Write the headers of a cast, by default of the one after the last; as arguments of
        kernels the numbers travel to a GPU without a wait.
        """
        self._headers[:, 0] = self._statuses + ShardStatus.NOT_FINITE * self.amaxes.flags
        if generation is None:
            self._headers[:, 1] += 1
        else:
            self._headers[:, 1].fill_(generation)
        self._sent.index_copy_(0, self._header_places, self._headers.view(-1))

    def statuses(self) -> list[ShardStatus]:
        """The status of each weight that the last cast has left. Waits for the device."""
        return [ShardStatus(status) for status in self._headers[:, 0].tolist()]

    def _tables_without(self, names: frozenset[str]) -> list[WeightTable]:
        """Tables of what no step has measured of these weights, or written the codes of."""
        if names not in self._without:
            if len(self._without) - len(self._in_graphs[0]) >= MOST_TABLES:
                self._without = self._in_graphs[0].copy()
            self._without[names] = self._tables_of(self.shards, names)
        return self._without[names]

    def _cut_rows_of(self, names: frozenset[str]) -> list[WeightTable]:
        """Tables of the rows of blocks that a boundary cuts, of weights whose other codes a step
        has written.
        """
        if names not in self._cut_rows:
            if len(self._cut_rows) - len(self._in_graphs[1]) >= MOST_TABLES:
                self._cut_rows = self._in_graphs[1].copy()
            tables = self._tables_of({name: shard for name, shard in self.shards.items() if name in names})
            self._cut_rows[names] = [table.cut_rows for table in tables if table.cut_rows]
        return self._cut_rows[names]


def _gathered_together(weights: Sequence[FSDPWeight]) -> list[list[FSDPWeight]]:
    """The weights that send their side channels as one, in the order of each gather; any other one
    by itself.
    """
    found = []
    for gathered in _by_gather(weights):
        is_joint = len(gathered) > 1 and all(weight.may_share_side for weight in gathered)
        joint = JointLayout([weight.layout for weight in gathered]) if is_joint else None
        for place, weight in enumerate(gathered):
            weight.joint, weight.place = joint, place
        found += [gathered] if is_joint else [[weight] for weight in gathered]
    return found


def _alike(gathers: Iterable[list[FSDPWeight]]) -> list[list[list[FSDPWeight]]]:
    """Gathers of weights with the same geometries together, as those of equal layers are."""
    found: dict[Hashable, list[list[FSDPWeight]]] = {}
    for gathered in gathers:
        key = tuple(weight.geometry for weight in gathered)
        found.setdefault((key, gathered[0].joint is None), []).append(gathered)
    return list(found.values())


def _scale_buffers(weights: Sequence[FSDPWeight]) -> list[tuple[str, Buffer]]:
    """The scale buffers of weights of one geometry by name, with a first dimension of weights."""
    first, geometry = weights[0], weights[0].geometry
    specs = layout.buffers(first.format, (geometry.cast_rows, geometry.columns), geometry.nominal)
    found = [(region.name, specs[region.name]) for region in first.layout.scales]
    return [(name, replace(spec, shape=(len(weights), *spec.shape))) for name, spec in found if spec is not None]


def _side_by_side(shapes: Sequence[Buffer], device: torch.device) -> tuple[Tensor, Iterator[Tensor]]:
    """(memory, buffers in it that nobody has written), uint8 and aligned as allocations are."""
    sizes = [math.prod(spec.shape) * spec.dtype.itemsize for spec in shapes]
    memory = torch.empty(
        sum(round_up(size, ALLOCATION_ALIGNMENT_BYTES) for size in sizes), dtype=torch.uint8, device=device
    )
    parts = memory.split([round_up(size, ALLOCATION_ALIGNMENT_BYTES) for size in sizes])
    buffers = zip(parts, sizes, shapes, strict=True)
    return memory, (part[:size].view(spec.dtype).view(spec.shape) for part, size, spec in buffers)


def _kept_bytes(gathered: Sequence[FSDPWeight]) -> int:
    return (gathered[0].joint or gathered[0].layout).kept_bytes


def _by_gather(weights: Iterable[FSDPWeight]) -> list[list[FSDPWeight]]:
    """The weights that FSDP2 gathers together, in the order of each gather."""
    found: dict[int, list[FSDPWeight]] = {}
    for weight in weights:
        found.setdefault(id(weight.group), []).append(weight)
    return list(found.values())


def _delayed_buffers(weights: Iterable[FSDPWeight], device: torch.device) -> dict[str, dict[str, Tensor]]:
    """`scale` and `amax_history` of the weights with delayed scaling, side by side, so that they
    are few tensors to torch.
    """
    delayed = [weight for weight in weights if weight.format.amax_policy is AmaxPolicy.DELAYED]
    lengths = [weight.format.amax_history_len for weight in delayed]
    scales = torch.ones(len(delayed), dtype=torch.float32, device=device)
    histories = torch.zeros(sum(lengths), dtype=torch.float32, device=device)
    parts = zip(scales.split(1), histories.split(lengths), strict=True) if delayed else ()
    return {
        weight.name: {"scale": scale, "amax_history": history}
        for weight, (scale, history) in zip(delayed, parts, strict=True)
    }


def _seeded_state(weights: Iterable[FSDPWeight]) -> dict[str, dict[str, Tensor]]:
    """Collect the state of delayed scaling from the cast groups that the weights were in before."""
    before = {id(weight.scaling): weight.scaling for weight in weights if weight.scaling}
    return {
        name: state
        for scaling in before.values()
        for name, state in scaling.state_dict().items()
        if name not in scaling.unseeded
    }
