"""CastGroup: casts weights whose amaxes are reduced together (`zerocast.cast.pipeline`) into the
bytes that gathers send.

The layers of a model repeat their shapes. The send buffers of layers that are sharded identically
are at equal distances in memory, and so are the scale buffers that the stages of a cast fill. One
strided copy then moves the scales of all these layers into the send buffers.

There are three ways to make the codes that a gather sends. If codes are *kept* (`keep_codes`), a
cast writes them into the send buffers, where they stay until the next cast. Otherwise each gather
casts its own codes (GatherCast) and frees them. Codes are *held* if an optimizer is about to step
inside a backward pass, which still gathers the weights of its forward pass: they are cast once, and
all gathers until the next cast send them.
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
from zerocast.distributed.row_shards import CODES, WeightLayout
from zerocast.formats import AmaxPolicy
from zerocast.formats.layout import Buffer
from zerocast.fsdp2.amax_layout import ReductionGroup, StepAmaxes
from zerocast.fsdp2.gather_layout import GatherLayout, side_by_side
from zerocast.fsdp2.param_groups import ParamGroup
from zerocast.fsdp2.weight import FSDPWeight

# The number of sets of weights whose tables a TableCache keeps. With experts, the set of weights
# that a step measures may change with every step.
MAX_CACHED_SETS = 8


class CastGroup:
    """Casts the weights of some parameter groups, on one device, with one reduction of amaxes. All
    ranks have the same weights in the same order. A CastGroup lives until masters move or formats
    change.

    Args:
        groups: the parameter groups. Their weights are located.
        reduction: the ranks that reduce amaxes.
        keep_codes: True if a cast writes all bytes that are sent, False if each gather casts its
            codes.
        scaling: the state of delayed scaling to continue from, keyed by weight.

    Attributes:
        keep_codes: as above. Fixed.
        amaxes: the amaxes of the last cast, or of an optimizer step since then. Fixed memory.
        delayed: the delayed scaling of the weights that have it. Continues over all casts.
        shards: this rank's part of each weight, keyed by name. Weights without a row on this rank
            are left out unless they have one scale for the full tensor. Fixed.
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
        self._delayed_buffers = _allocate_delayed_buffers(weights, self._device)
        self.delayed = DelayedScaling(self._delayed_buffers, self._device, unseeded=self._delayed_buffers)
        self.delayed.load_state_dict(scaling)
        # True once a CUDA graph uses the scale buffers, whose address must not change.
        self._keeps_scale_memory = False
        self.shards: dict[str, MasterShard] = {}
        # The scales of the block rows that this rank owns: views of the send buffers, and the views
        # of the scale buffers that are copied there. Fixed.
        self._sent_scales: list[Tensor] = []
        self._computed_scales: list[Tensor] = []
        # The casts that gathers make, with their groups. Empty if casts keep codes. Fixed.
        self._gather_casts: list[tuple[ParamGroup, GatherCast]] = []
        self._lay_out(groups)

    def build_tables(self) -> None:
        """Build the tables of casts. Before this call, and if it raises, the group can only take
        part in the reductions of other ranks (`join_collectives`).
        """
        tables = functools.partial(_tables_of, self.shards, self.amaxes, self._device, self._backend)
        try:
            for group, gather_cast in self._gather_casts:
                gather_cast.build_tables(group.weights, self.shards, self.amaxes.offsets, self.delayed)
            # The tables of all weights except those whose amaxes, or codes, a step has made.
            self._tables_without = TableCache(lambda names: tables(without=names))
            # The tables of the block rows that a boundary between shards splits, for weights whose
            # other codes a step has written.
            self._split_rows_of = TableCache(
                lambda names: [table.split_rows for table in tables(of=names) if table.split_rows]
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
        """Allocate the send buffers of all groups and the scale buffers that the stages fill. The
        buffers of groups with equal layouts are adjacent.
        """
        groups_by_layout: dict[GatherLayout, list[ParamGroup]] = {}
        for group in groups:
            layout = GatherLayout(tuple(weight.geometry for weight in group.weights), self.keep_codes)
            groups_by_layout.setdefault(layout, []).append(group)
        sizes = [layout.kept_bytes * len(alike) for layout, alike in groups_by_layout.items()]
        send_buffers = torch.zeros(sum(sizes), dtype=torch.uint8, device=self._device)
        # The first dimension of a scale buffer counts the groups with equal layouts.
        scale_specs = [
            replace(spec, shape=(len(alike), *spec.shape))
            for layout, alike in groups_by_layout.items()
            for weight_layout in layout.weights
            for _, spec in _stage_scales(weight_layout)
        ]
        # The scale buffers have memory during a cast only, until a graph uses them.
        self._scales, scale_buffers = side_by_side(scale_specs, self._device)
        for (layout, alike), flat in zip(groups_by_layout.items(), send_buffers.split(sizes), strict=True):
            buffer_by_group = flat.view(len(alike), -1)
            self._make_shards(layout, alike, buffer_by_group, scale_buffers)
            for group, buffer in zip(alike, buffer_by_group, strict=True):
                cast_codes = None
                if not self.keep_codes:
                    gather_cast = GatherCast(layout, self.amaxes.buffer, self._backend)
                    self._gather_casts.append((group, gather_cast))
                    cast_codes = gather_cast.cast
                group.lay_out(layout, buffer, cast_codes)
        self._lay_out_headers(groups, send_buffers)

    def _lay_out_headers(self, groups: Sequence[ParamGroup], send_buffers: Tensor) -> None:
        """Prepare what `stamp` needs to write all headers with a few launches."""
        # The status that a cast writes into each header, by the flag of the weight (`StepAmaxes`):
        # int32 `[headers, 4]`.
        statuses_by_flag = []
        for weight in self.weights:
            status = weight.status_after_cast
            not_finite = ShardStatus.NOT_FINITE if status is ShardStatus.CLEAN else status
            statuses_by_flag.append((status, not_finite, ShardStatus.REFUSED_ELSEWHERE, ShardStatus.REPLICAS_DIFFER))
        self._statuses_by_flag = torch.tensor(statuses_by_flag, dtype=torch.int32).to(self._device)
        # The headers of the last cast, int32 `[headers, 2]`: status and number of the cast.
        self._headers = torch.zeros_like(self._statuses_by_flag[:, :2])
        # The offsets of both numbers of each header in the send buffers.
        self._send_words = send_buffers.view(torch.int32)
        starts = [header.storage_offset() for group in groups for header in group.headers]
        offsets = [start + word for start in starts for word in (0, 1)]
        self._header_offsets = torch.tensor(offsets, dtype=torch.int64).to(self._device)

    def _make_shards(
        self, layout: GatherLayout, groups: Sequence[ParamGroup], send_buffers: Tensor, scale_buffers: Iterator[Tensor]
    ) -> None:
        """Make the shards of groups with equal layouts. The first dimension of `send_buffers`,
        `[groups, bytes]`, and of the next of `scale_buffers` counts these groups.
        """
        # For each weight of the layout, the weights of all groups that are sharded identically.
        identical_weights = zip(*(group.weights for group in groups), strict=True)
        parts = layout.parts(send_buffers)
        for weight_layout, weights, (codes, metadata) in zip(layout.weights, identical_weights, parts, strict=True):
            scales = {name: next(scale_buffers) for name, _ in _stage_scales(weight_layout)}
            for index, weight in enumerate(weights):
                buffers = {
                    # If casts write no codes, this stays.
                    "rowwise_data": metadata[index, :0],
                    **{name: buffer[index] for name, buffer in scales.items()},
                    **weight_layout.scalars(metadata[index]),
                    **self._delayed_buffers.get(weight.name, {}),
                }
                shard = weight.shard_over([of_direction[index] for of_direction in codes], buffers)
                if weight_layout.geometry.takes_part:
                    self.shards[weight.name] = shard
            if weight_layout.geometry.takes_part:
                # One copy moves the scales of all these weights.
                for sent, computed in weight_layout.outgoing_scales(metadata, scales):
                    self._sent_scales.append(sent)
                    self._computed_scales.append(computed)

    # -- casts

    @torch.no_grad()
    def cast(self, repeat: bool) -> None:
        """Cast the masters as they are now into the send buffers, which hold no codes unless
        `keep_codes`. With `repeat`, delayed scaling uses the scales of the last cast again.
        """
        # Building a table checks the buffers of its weights, so they need memory before.
        self._allocate_scales()
        to_measure = self._tables_without.tables_for(self.amaxes.measured)
        to_code: list[WeightTable] = []
        if self.keep_codes:
            coded = self.amaxes.coded
            to_code = [*self._tables_without.tables_for(coded), *self._split_rows_of.tables_for(coded)]
        try:
            cast(self._tables, self.amaxes, self.delayed, to_measure=to_measure, to_code=to_code, repeat=repeat)
            if self._sent_scales:
                torch._foreach_copy_(self._sent_scales, self._computed_scales)
        finally:
            self._free_scales()

    def join_collectives(self) -> None:
        """Take part in the reduction of amaxes of the ranks that can cast. This rank contributes
        zeros, and flags that tell the ranks of other slices and replicas that it could not cast.
        """
        self.set_masters_readable(is_readable=False)
        self.amaxes.begin()
        self.amaxes.reduce()

    def set_masters_readable(self, *, is_readable: bool) -> None:
        """Set whether gathers can read the masters. If not, they send zeros for codes."""
        for _, gather_cast in self._gather_casts:
            gather_cast.has_masters = is_readable

    def stamp(self, cast_number: int | None) -> None:
        """Write the headers of a cast, without waiting for the device. In a CUDA graph, which
        counts its casts on the device, `cast_number` is None: one more than in the last headers.
        """
        flags = self.amaxes.flags.long().unsqueeze(1)
        self._headers[:, :1] = self._statuses_by_flag.gather(1, flags)
        if cast_number is None:
            self._headers[:, 1] += 1
        else:
            self._headers[:, 1].fill_(cast_number)
        self._send_words.index_copy_(0, self._header_offsets, self._headers.view(-1))

    def statuses(self) -> list[ShardStatus]:
        """Return the status of each weight in the headers of the last cast. Waits for the
        device.
        """
        return [ShardStatus(status) for status in self._headers[:, 0].tolist()]

    def kept_codes(self, name: str) -> Tensor:
        """Return the kept codes of this rank's shard of a weight that has one set of codes."""
        codes = self.shards[name].shard_data
        assert isinstance(codes, Tensor), name
        return codes

    def hold_codes(self) -> None:
        """Cast the codes of the masters as they are now, by the scales of the last cast, for all
        later gathers. Those run on another stream, so the CPU waits for the GPU.
        """
        for _, gather_cast in self._gather_casts:
            gather_cast.hold()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the current stream, before another stream reads its results."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    # -- graphs

    def hold_scales(self) -> None:
        """Keep the memory of the scale buffers, since a CUDA graph is going to use its address."""
        self._keeps_scale_memory = True
        self._allocate_scales()

    def hold_tables(self) -> None:
        """Keep the tables of the next cast for the life of this group, since a CUDA graph is going
        to use their addresses.
        """
        self._allocate_scales()
        self._tables_without.hold(self.amaxes.measured)
        self._tables_without.hold(self.amaxes.coded)
        self._split_rows_of.hold(self.amaxes.coded)

    def _allocate_scales(self) -> None:
        storage = self._scales.untyped_storage()
        if storage.nbytes() != self._scales.nbytes:
            storage.resize_(self._scales.nbytes)

    def _free_scales(self) -> None:
        if not self._keeps_scale_memory:
            self._scales.untyped_storage().resize_(0)


class TableCache:
    """Caches the tables that `build` makes for a set of weights, such as those whose amaxes
    FusedAdamW has measured. The set changes if experts get no gradient in some steps.

    Attributes:
        held: the tables of sets that are kept for the life of this object, keyed by set.
    """

    def __init__(self, build: Callable[[frozenset[str]], list[WeightTable]]) -> None:
        self._build = build
        self.held = {frozenset[str](): build(frozenset())}
        # The tables of at most MAX_CACHED_SETS other sets.
        self._recent: dict[frozenset[str], list[WeightTable]] = {}

    def tables_for(self, names: frozenset[str]) -> list[WeightTable]:
        """Return the tables of a set."""
        if names in self.held:
            return self.held[names]
        if names not in self._recent:
            if len(self._recent) >= MAX_CACHED_SETS:
                self._recent.clear()
            self._recent[names] = self._build(names)
        return self._recent[names]

    def hold(self, names: frozenset[str]) -> None:
        """Keep the tables of a set for the life of this object."""
        self.held[names] = self.tables_for(names)


class GatherCast:
    """Casts the codes of a parameter group when FSDP2 gathers it. They are freed once sent.

    The codes of a shard are most of the bytes that a rank sends, and nothing reads them between two
    gathers. So a cast makes amaxes, scales and headers only. FSDP2's hook then casts the codes of a
    group from its masters and these scales: one launch for the weights of a format, on the stream
    that FSDP2 copies from. A gather thus reads 4 bytes per element and writes a code, as plain
    FSDP2 does to send bf16.

    Optimizers that step inside a backward pass write masters while the pass still gathers the
    weights of its forward pass. Before that, `hold` keeps the codes of those weights until the next
    cast.

    Args:
        layout: the layout of the bytes that the group sends.
        packed: the amaxes of the last cast.
        backend: a name from `zerocast.backends`.

    Attributes:
        has_masters: False while the masters cannot be read. Gathers then send zeros.
    """

    def __init__(
        self,
        layout: GatherLayout,
        packed: Tensor,
        backend: str,
    ) -> None:
        self._packed, self._backend = packed, backend
        self.has_masters = True
        # One buffer contains the codes of all weights. These are the sizes of its parts in bytes:
        # the codes of a weight in one direction, the gap after them, the next codes, and so on.
        self._part_sizes: list[int] = []
        # The codes of each weight, by direction, as a slice of the parts without gaps.
        self._codes_of_weights: list[slice] = []
        for weight in layout.weights:
            first = len(self._part_sizes) // 2
            starts = [start for start, _ in weight.code_spans]
            next_starts = [*starts[1:], weight.codes_nbytes]
            for (start, stop), next_start in zip(weight.code_spans, next_starts, strict=True):
                self._part_sizes += [stop - start, next_start - stop]
            self._codes_of_weights.append(slice(first, len(self._part_sizes) // 2))
        self._nbytes = sum(self._part_sizes)
        # The codes that all later gathers send, after `hold`. None while each gather casts its
        # codes.
        self._held: list[Sequence[Tensor]] | None = None
        self._empty_storage = torch.empty(0, dtype=torch.uint8, device=packed.device).untyped_storage()

    def build_tables(
        self,
        weights: Sequence[FSDPWeight],
        shards: Mapping[str, MasterShard],
        offsets: Mapping[str, tuple[int, int]],
        delayed: DelayedScaling,
    ) -> None:
        """Build the tables of casts. Called before the first cast.

        The weights are not kept. FSDP2 holds this object, so a reference to them would keep a
        dropped model alive beyond a garbage collection.

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
            scale = delayed.cast_scale(weight.name)
            if scale is not None:
                buffers["scale"] = scale
            tables.of(shard.weight).add_shard(weight.shard_over(codes, buffers), offsets[weight.name])
        # Both live as long as this object. The tables write codes into the base tensors, which get
        # the memory of one gather at a time.
        self._tables = tables.freeze()
        self._code_bases = [base for table in self._tables for name in CODES for base in table.buffers[name].tensors]
        memory.untyped_storage().resize_(0)

    def _by_weight(self, memory: Tensor) -> list[Sequence[Tensor]]:
        """Return the codes of each weight, by direction, in `memory`."""
        parts = memory.split_with_sizes(self._part_sizes)
        codes_without_gaps = parts[::2]
        return [codes_without_gaps[of_weight] for of_weight in self._codes_of_weights]

    def cast(self) -> list[Sequence[Tensor]]:
        """Return the codes of each weight, by direction, uint8, for one gather. Unless codes are
        held, cast them from the masters as they are now, by the scales of the last cast.

        FSDP2 gathers in a no_grad context, so this needs none.
        """
        if self._held is not None:
            return self._held
        if not self.has_masters:
            return self._by_weight(torch.zeros(self._nbytes, dtype=torch.uint8, device=self._packed.device))
        memory = torch.empty(self._nbytes, dtype=torch.uint8, device=self._packed.device)
        for base in self._code_bases:
            base.set_(memory.untyped_storage(), 0, (self._nbytes,), (1,))
        try:
            for table in self._tables:
                table.partial_cast(self._packed, None)
        finally:
            for base in self._code_bases:
                base.set_(self._empty_storage)
        return self._by_weight(memory)

    def hold(self) -> None:
        """Cast the codes of the masters as they are now, for all later gathers."""
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
    """Build the tables of the weights in `of` (None means all), except those in `without`."""
    tables = WeightTables(device, backend)
    for name, shard in shards.items():
        if name not in without and (of is None or name in of):
            shared, flag = amaxes.shared.get(name, -1), amaxes.flag_of[name]
            tables.of(shard.weight).add_shard(shard, amaxes.offsets[name], shared=shared, flag=flag)
    return tables.freeze()


def _stage_scales(layout: WeightLayout) -> list[tuple[str, Buffer]]:
    """Return the name and spec of each scale buffer that the stages of a cast fill for a weight."""
    geometry = layout.geometry
    return [(region.name, spec) for region, spec in layout.scale_specs(geometry.shape(geometry.cast_rows))]


def _allocate_delayed_buffers(weights: Iterable[FSDPWeight], device: torch.device) -> dict[str, dict[str, Tensor]]:
    """Allocate `scale` and `amax_history` of the weights with delayed scaling, keyed by weight, as
    views of two tensors.
    """
    delayed = [weight for weight in weights if weight.format.amax_policy is AmaxPolicy.DELAYED]
    if not delayed:
        return {}
    lengths = [weight.format.amax_history_len for weight in delayed]
    scales = torch.ones(len(delayed), dtype=torch.float32, device=device).split(1)
    histories = torch.zeros(sum(lengths), dtype=torch.float32, device=device).split(lengths)
    buffers = {}
    for weight, scale, history in zip(delayed, scales, histories, strict=True):
        buffers[weight.name] = {"scale": scale, "amax_history": history}
    return buffers
