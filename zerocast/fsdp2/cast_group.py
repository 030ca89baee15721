"""CastGroup: the cast of weights whose amaxes are reduced together (`zerocast.cast.pipeline`), into
the bytes that gathers send.

The layers of a model repeat their shapes. If they are sharded identically, their bytes are at equal
distances in memory, and so are the scale buffers that the stages fill. One strided copy then takes
the scales of all layers from these buffers to the bytes.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zerocast import backends
from zerocast.cast.delayed_scaling import DelayedScaling
from zerocast.cast.partition import MasterShard
from zerocast.cast.pipeline import cast
from zerocast.cast.tables import WeightTable, WeightTables
from zerocast.distributed.rank_report import ShardStatus
from zerocast.distributed.row_shards import CODES
from zerocast.formats import AmaxPolicy
from zerocast.fsdp2.amax_layout import ReductionGroup, StepAmaxes
from zerocast.fsdp2.gather_layout import GatherLayout, side_by_side
from zerocast.fsdp2.param_groups import ParamGroup
from zerocast.fsdp2.weight import FSDPWeight

# Tables that are kept for sets of weights that steps have not measured. Which experts learn may
# change with every step.
MOST_TABLES = 8


class CastGroup:
    """The cast of the weights of some parameter groups, on one device, with one reduction. All
    ranks have the same weights in the same order. A CastGroup lives until masters move or formats
    change.

    Args:
        groups: the parameter groups. Their weights are located.
        reduction: the ranks that reduce amaxes.
        keep_codes: True if a cast makes all bytes that are sent, False if each gather makes its
            codes.
        scaling: the state of delayed scaling, keyed by the names of the weights that have one.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        reduction: ReductionGroup,
        keep_codes: bool,
        scaling: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        self._groups = groups
        self.keep_codes = keep_codes
        weights = self.weights
        self.amaxes = StepAmaxes(weights, reduction)
        self._device = weights[0].master.device
        self._backend = backends.choose(self._device)
        self._delayed_buffers = _delayed_buffers(weights, self._device)
        self.delayed = DelayedScaling(self._delayed_buffers, self._device, unseeded=self._delayed_buffers)
        self.delayed.load_state_dict(scaling)
        # True while a graph holds the address of the buffers that a cast works in.
        self._holds_scales = False
        self.shards: dict[str, MasterShard] = {}
        # The scales of owned block rows: where they are in the metadata, and in the buffers that
        # the stages fill.
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._gather_casts: list[tuple[ParamGroup, GatherCast]] = []
        self._lay_out(groups)

    def build_tables(self) -> None:
        """Build the tables of casts. Before that, and if this raises, the group can only take part
        in the casts of other ranks.
        """
        tables = functools.partial(_tables_of, self.shards, self.amaxes, self._device, self._backend)
        try:
            for group, gather_cast in self._gather_casts:
                gather_cast.build_tables(group.weights, self.shards, self.amaxes.offsets, self.delayed)
            self._tables_without = TablesOfSets(lambda names: tables(without=names))
            # The block rows that a boundary between shards splits.
            self._rest_of_rows_for = TablesOfSets(
                lambda names: [table.rest_of_rows for table in tables(of=names) if table.rest_of_rows]
            )
            self._tables = self._tables_without.tables_for(frozenset())
        finally:
            self._free_scales()

    @property
    def weights(self) -> list[FSDPWeight]:
        """The weights, which the model keeps alive."""
        return [weight for group in self._groups for weight in group.weights]

    # -- memory

    def _lay_out(self, groups: Sequence[ParamGroup]) -> None:
        """Give all groups the bytes that they send, groups of equal layouts side by side, and the
        stages the buffers that they fill.
        """
        alike: dict[GatherLayout, list[ParamGroup]] = {}
        for group in groups:
            layout = GatherLayout(tuple(weight.geometry for weight in group.weights), self.keep_codes)
            alike.setdefault(layout, []).append(group)
        sizes = [layout.kept_bytes * len(members) for layout, members in alike.items()]
        all_sent = torch.zeros(sum(sizes), dtype=torch.uint8, device=self._device)
        # The scale buffers that the stages fill, with a first dimension of groups with equal
        # layouts.
        scale_specs = [
            replace(spec, shape=(len(members), *spec.shape))
            for layout, members in alike.items()
            for weight in layout.weights
            for _, spec in weight.scale_specs(weight.geometry.shape(weight.geometry.cast_rows))
        ]
        # They have memory during a cast only, unless that is held.
        self._scales, buffers = side_by_side(scale_specs, self._device)
        for (layout, members), flat in zip(alike.items(), all_sent.split(sizes), strict=True):
            sent = flat.view(len(members), -1)
            self._lay_out_alike(layout, members, sent, buffers)
            for group, own in zip(members, sent, strict=True):
                cast_codes = None
                if not self.keep_codes:
                    gather_cast = GatherCast(layout, self.amaxes.buffer, self._backend)
                    self._gather_casts.append((group, gather_cast))
                    cast_codes = gather_cast.cast
                group.lay_out(layout, own, cast_codes)
        self._sent = all_sent.view(torch.int32)
        # The statuses that a cast leaves in headers, by the flags of weights: int32 `[headers, 4]`.
        of_flags = []
        for status in (weight.status_after_cast for weight in self.weights):
            not_finite = ShardStatus.NOT_FINITE if status is ShardStatus.CLEAN else status
            of_flags.append((status, not_finite, ShardStatus.REFUSED_ELSEWHERE, ShardStatus.REPLICAS_DIFFER))
        self._statuses = torch.tensor(of_flags, dtype=torch.int32).to(self._device)
        # The headers of the next cast, int32 `[headers, 2]`, and the offsets of their numbers in
        # `_sent`.
        self._headers = torch.zeros_like(self._statuses[:, :2])
        headers = [header for group in groups for header in group.headers]
        places = [header.storage_offset() + half for header in headers for half in (0, 1)]
        self._header_places = torch.tensor(places, dtype=torch.int64).to(self._device)

    def _lay_out_alike(
        self, layout: GatherLayout, groups: Sequence[ParamGroup], sent: Tensor, buffers: Iterator[Tensor]
    ) -> None:
        """Make the shards of groups with equal layouts, over `sent`, `[groups, bytes]`, and the
        next of the `buffers` of scales.
        """
        all_metadata = [metadata for _, metadata in layout.parts(sent)]
        parts = [layout.parts(own) for own in sent]
        members = [group.weights for group in groups]
        for weight_index, weight_layout in enumerate(layout.weights):
            geometry = weight_layout.geometry
            stage_scales = weight_layout.scale_specs(geometry.shape(geometry.cast_rows))
            scales = {region.name: next(buffers) for region, _ in stage_scales}
            for index, weight in enumerate(weights[weight_index] for weights in members):
                codes, metadata = parts[index][weight_index]
                own = {name: buffer[index] for name, buffer in scales.items()} | weight_layout.scalars(metadata)
                own |= self._delayed_buffers.get(weight.name, {})
                # Codes that are not kept have no bytes here.
                shard = weight.shard_over(codes, {"rowwise_data": metadata[:0], **own})
                if weight.geometry.takes_part:
                    self.shards[weight.name] = shard
            if geometry.takes_part:
                for target, source in weight_layout.outgoing_scales(all_metadata[weight_index], scales):
                    self._targets.append(target)
                    self._sources.append(source)

    # -- casts

    @torch.no_grad()
    def cast(self, repeat: bool) -> None:
        """Cast the masters as they are now into the bytes to send, without codes that are not kept.
        With `repeat`, cast by the delayed scales of the last cast.
        """
        # Before any table is built, since that checks the buffers of its weights.
        self._allocate_scales()
        to_measure = self._tables_without.tables_for(self.amaxes.measured)
        to_code: list[WeightTable] = []
        if self.keep_codes:
            coded = self.amaxes.coded
            to_code = [*self._tables_without.tables_for(coded), *self._rest_of_rows_for.tables_for(coded)]
        try:
            cast(self._tables, self.amaxes, self.delayed, to_measure=to_measure, to_code=to_code, repeat=repeat)
            if self._targets:
                torch._foreach_copy_(self._targets, self._sources)
        finally:
            self._free_scales()

    def join_collectives(self) -> None:
        """Reduce amaxes with the ranks that cast. This rank contributes zeros, and flags by which
        the ranks of other slices and replicas know that it could not cast.
        """
        self.note_masters(are_there=False)
        self.amaxes.begin()
        self.amaxes.reduce()

    def note_masters(self, *, are_there: bool) -> None:
        """Note whether gathers can read the masters. If not, they send zeros for codes."""
        for _, gather_cast in self._gather_casts:
            gather_cast.has_masters = are_there

    def stamp(self, generation: int | None) -> None:
        """Write the headers of cast number `generation`. None is for the cast after the last one,
        which a GPU counts by itself in a graph. The CPU waits for nothing.
        """
        self._headers[:, :1] = self._statuses.gather(1, self.amaxes.flags.long().unsqueeze(1))
        if generation is None:
            self._headers[:, 1] += 1
        else:
            self._headers[:, 1].fill_(generation)
        self._sent.index_copy_(0, self._header_places, self._headers.view(-1))

    def statuses(self) -> list[ShardStatus]:
        """Return the status that the last cast has left of each weight. Waits for the device."""
        return [ShardStatus(status) for status in self._headers[:, 0].tolist()]

    def kept_codes(self, name: str) -> Tensor:
        """Return the kept codes of a weight with one set of codes, from its first element here."""
        codes = self.shards[name].shard_data
        assert isinstance(codes, Tensor), name
        return codes

    def hold_codes(self) -> None:
        """Keep the codes of the masters as they are now, by the scales of the last cast. The CPU
        waits for a GPU once, since later gathers run on another stream.
        """
        for _, gather_cast in self._gather_casts:
            gather_cast.hold()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the work of this stream, before another stream reads its results."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    # -- graphs

    def hold_scales(self) -> None:
        """Keep the memory of scale buffers, since a graph is going to hold its address."""
        self._holds_scales = True
        self._allocate_scales()

    def hold_tables(self) -> None:
        """Keep the tables of the coming cast as long as this group, since a graph is going to hold
        their addresses.
        """
        self._allocate_scales()
        self._tables_without.hold(self.amaxes.measured)
        self._tables_without.hold(self.amaxes.coded)
        self._rest_of_rows_for.hold(self.amaxes.coded)

    def _allocate_scales(self) -> None:
        storage = self._scales.untyped_storage()
        if storage.nbytes() != self._scales.nbytes:
            storage.resize_(self._scales.nbytes)

    def _free_scales(self) -> None:
        if not self._holds_scales:
            self._scales.untyped_storage().resize_(0)


class TablesOfSets:
    """The tables that `make` builds for the set of weights that FusedAdamW has measured or coded
    before a cast. The set differs between steps if experts got no gradient in some. It keeps the
    tables of the last few sets, and the tables of sets that are `held` as long as this object.
    """

    def __init__(self, make: Callable[[frozenset[str]], list[WeightTable]]) -> None:
        self._make = make
        self.held = {frozenset[str](): make(frozenset())}
        self._recent: dict[frozenset[str], list[WeightTable]] = {}

    def tables_for(self, names: frozenset[str]) -> list[WeightTable]:
        """Return the tables of a set."""
        if names in self.held:
            return self.held[names]
        if names not in self._recent:
            if len(self._recent) >= MOST_TABLES:
                self._recent.clear()
            self._recent[names] = self._make(names)
        return self._recent[names]

    def hold(self, names: frozenset[str]) -> None:
        """Keep the tables of a set."""
        self.held[names] = self.tables_for(names)


class GatherCast:
    """The cast of the codes of a parameter group when FSDP2 gathers it. They are freed once sent.

    The codes of a shard are most of the bytes that a rank sends, and nothing reads them between two
    gathers. So a cast makes amaxes, scales and headers only, and FSDP2's hook casts the codes of a
    group from its masters by these: one launch for the weights of a format, on the stream that
    FSDP2 copies from. A gather then reads 4 bytes per element and writes a code, as plain FSDP2
    does to send bf16.

    Optimizers that step within a backward pass write masters while the pass still gathers the
    weights of its forward pass: `hold` keeps their codes until the next cast.

    Args:
        layout: the layout of the bytes that the group sends.
        packed: the amaxes of the last cast.
        backend: a name from `zerocast.backends`.

    Attributes:
        has_masters: False while the masters cannot be read. Zeros are sent then.
    """

    def __init__(
        self,
        layout: GatherLayout,
        packed: Tensor,
        backend: str,
    ) -> None:
        self._packed, self._backend = packed, backend
        self.has_masters = True
        # One buffer has the codes of all weights. `_sizes` are the bytes of each set of codes and
        # of the gap after it, `_sets` the sets of each weight, by direction.
        self._sizes: list[int] = []
        self._sets: list[slice] = []
        for of_weight in layout.weights:
            first = len(self._sizes) // 2
            starts = [start for start, _ in of_weight.code_spans]
            for (start, stop), end in zip(of_weight.code_spans, [*starts[1:], of_weight.codes_nbytes], strict=True):
                self._sizes += [stop - start, end - stop]
            self._sets.append(slice(first, len(self._sizes) // 2))
        self._nbytes = sum(self._sizes)
        # The codes that all gathers to come send. None while each gather casts its codes.
        self._held: list[Sequence[Tensor]] | None = None
        self._nothing = torch.empty(0, dtype=torch.uint8, device=packed.device).untyped_storage()

    def build_tables(
        self,
        weights: Sequence[FSDPWeight],
        shards: Mapping[str, MasterShard],
        offsets: Mapping[str, tuple[int, int]],
        delayed: DelayedScaling,
    ) -> None:
        """Build the tables of casts. Called before the first one.

        The weights are not kept: FSDP2 holds this object, and a dropped model would outlive a
        collection.

        Args:
            weights: the weights of the group.
            shards: the shards of this rank, keyed by name. Weights without a row on this rank are
                left out.
            offsets: the offsets of each weight's amaxes in `packed`.
            delayed: the scales of the last cast, from which delayed scaling has moved on.
        """
        memory = torch.empty(self._nbytes, dtype=torch.uint8, device=self._packed.device)
        tables = WeightTables(self._packed.device, self._backend)
        for weight, codes in zip(weights, self._by_weight(memory), strict=True):
            shard = shards.get(weight.name)
            if shard is None:
                continue
            buffers = {name: buffer for name, buffer in shard.weight.state.buffers.items() if buffer is not None}
            if (scale := delayed.cast_scale(weight.name)) is not None:
                buffers["scale"] = scale
            tables.of(shard.weight).add_shard(weight.shard_over(codes, buffers), offsets[weight.name])
        # Like the bases of codes below, they live as long as the group.
        self._tables = tables.freeze()
        self._bases = [base for table in self._tables for name in CODES for base in table.buffers[name].tensors]
        memory.untyped_storage().resize_(0)

    def _by_weight(self, memory: Tensor) -> list[Sequence[Tensor]]:
        """Return the codes of each weight, by direction, in `memory`."""
        codes = memory.split_with_sizes(self._sizes)[::2]
        return [codes[sets] for sets in self._sets]

    def cast(self) -> list[Sequence[Tensor]]:
        """Return the codes of each weight by direction, uint8, for one gather. They are cast from
        the masters as they are now, by the scales of the last cast, unless codes are held.

        Called without gradients, as FSDP2 gathers.
        """
        if self._held is not None:
            return self._held
        if not self.has_masters:
            return self._by_weight(torch.zeros(self._nbytes, dtype=torch.uint8, device=self._packed.device))
        memory = torch.empty(self._nbytes, dtype=torch.uint8, device=self._packed.device)
        for base in self._bases:
            base.set_(memory.untyped_storage(), 0, (self._nbytes,), (1,))
        try:
            for table in self._tables:
                table.partial_cast(self._packed, None)
        finally:
            for base in self._bases:
                base.set_(self._nothing)
        return self._by_weight(memory)

    def hold(self) -> None:
        """Keep the codes of the masters as they are now, for all gathers to come."""
        with torch.no_grad():
            self._held = self.cast()


def _tables_of(
    shards: Mapping[str, MasterShard],
    amaxes: StepAmaxes,
    device: torch.device,
    backend: str,
    *,
    of: Collection[str] | None = None,
    without: Collection[str] = (),
) -> list[WeightTable]:
    """Build the tables of the weights in `of`, by default of all, that are not in `without`."""
    tables = WeightTables(device, backend)
    for name, shard in shards.items():
        if name not in without and (of is None or name in of):
            shared, flag = amaxes.shared.get(name, -1), amaxes.flag_of[name]
            tables.of(shard.weight).add_shard(shard, amaxes.offsets[name], shared=shared, flag=flag)
    return tables.freeze()


def _delayed_buffers(weights: Iterable[FSDPWeight], device: torch.device) -> dict[str, dict[str, Tensor]]:
    """Allocate `scale` and `amax_history` of the weights with delayed scaling, side by side in two
    tensors.
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
