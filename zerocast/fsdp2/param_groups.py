"""The parameter groups of FSDP2 in a prepared model.

A ParamGroup belongs to one FSDPParamGroup. It supplies the quantized bytes that an all-gather sends
and post-processes the gathered bytes. ParamGroups holds all groups of a model and decides which of
them must be gathered again.
"""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zerocast.distributed.group import ONE_PROCESS, Group
from zerocast.distributed.rank_report import ShardStatus
from zerocast.formats import FormatSpec
from zerocast.formats.element import dtype_name
from zerocast.formats.layout import Buffer
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.gather_layout import GatheredMetadata, GatherLayout, header_of, side_by_side
from zerocast.fsdp2.gather_status import GatherStatus
from zerocast.fsdp2.weight import AS_QUANTIZED_WEIGHT, FSDPWeight, living, shard_statuses
from zerocast.weight.gathered_operands import GatheredOperands
from zerocast.weight.validity import gathered_together

if TYPE_CHECKING:
    from zerocast.fsdp2.manager import CastManager


class ParamGroup:
    """The prepared weights of one FSDPParamGroup, which FSDP2 gathers together.

    Attributes:
        names: the names of the prepared weights, in the order of the gather. A weight's `index` is
            its position here. Fixed for the life of the group.
        sent_cast: the number of the cast whose bytes the last gather sent. -1 before the first
            gather.
        layout: the layout of the bytes that this rank sends. Replaced by each `lay_out`.
        headers: the header of each weight, int32 `[2]`, a view of the bytes that this rank sends.
            Replaced by each `lay_out`.
        cast_codes: casts the codes of each weight, by direction, for one gather. None if casts
            write the codes into the send buffer. Replaced by each `lay_out`.
        metadata: the gathered bytes other than codes. None before the first gather, and after a
            switch of formats until the next gather.
        outputs: the tensors of each weight that FSDP2 gathers into. Empty before the first gather,
            and after a switch of formats until the next gather.
        is_merged: True if FSDP2 gathers the weights as one parameter, the first one
            (`GroupOfWeights`). Set after the first gather of a layout over several ranks; reset by
            a switch of formats.
    """

    layout: GatherLayout
    headers: list[Tensor]
    cast_codes: Callable[[], Sequence[Sequence[Tensor]]] | None

    def __init__(self, group: Any, members: Sequence[tuple[FSDPWeight, Any]], status: GatherStatus) -> None:
        """Take over the gathers of `members`, pairs of a weight and its FSDPParam."""
        self._group: Callable[[], Any] = weakref.ref(group)
        self._covers_group = torch_fsdp.take_over_group(group, self, [param for _, param in members])
        self._status = status
        self._weights = [weakref.ref(weight) for weight, _ in members]
        self.names = tuple(weight.name for weight, _ in members)
        self.sent_cast = -1
        self._last_index = len(members) - 1
        for index, (weight, param) in enumerate(members):
            weight.adopt(self, index, param)
        # The tensors of each weight in the send buffer. They are sent by every gather, after the
        # codes that `cast_codes` makes. Replaced by each `lay_out`.
        self._buffer_outputs: list[tuple[Tensor, ...]] = []
        # The status that a cast writes into the header of each weight. Replaced by each `lay_out`.
        self._cast_statuses: list[ShardStatus] = []
        # The statuses that the last gather sent, and the number of the cast whose bytes it sent.
        self._sent_statuses: list[ShardStatus] = []
        self._sent_statuses_cast = -1
        # The tensors of each weight that the current gather sends, until FSDP2 has taken them.
        self._outgoing: list[list[Tensor]] = []
        # Operands that products read instead of gathered codes. Empty before the first gather, and
        # after a switch of formats until the next gather.
        self._operands: list[GatheredOperands] = []
        self.metadata: GatheredMetadata | None = None
        self.is_merged = False
        self.outputs: list[list[Tensor]] = []

    @property
    def weights(self) -> list[FSDPWeight]:
        """The weights, which the model keeps alive."""
        return living(self._weights)

    @property
    def _manager(self) -> "CastManager":
        """The manager that casts the weights, which keep it alive."""
        return self.weights[0].manager

    @property
    def is_unsharded(self) -> bool:
        """True while the weights are gathered."""
        return bool(self._group().is_unsharded)

    @property
    def replicas(self) -> Group:
        """The ranks that hold the same shards (HSDP)."""
        return Group.of(torch_fsdp.replicas(self._group()) or ONE_PROCESS)

    def problem(self) -> str | None:
        """Return why FSDP2 cannot gather quantized weights in this group, or None if it can."""
        if self._group()._use_post_forward_mesh:
            return (
                "reshard_after_forward=<int> does not work with quantized weights (FSDP2 reshards only plain tensors): "
                "pass True or False"
            )
        return None

    def check_masters(self) -> None:
        """Raise RuntimeError if something has replaced a master by a plain tensor."""
        for weight in self.weights:
            weight.check_not_replaced()

    # -- bytes that this rank sends

    def lay_out(
        self, layout: GatherLayout, buffer: Tensor, cast_codes: Callable[[], Sequence[Sequence[Tensor]]] | None
    ) -> None:
        """Send from `buffer` from now on, uint8 `[layout.kept_bytes]`, which casts fill. It
        contains zeros.
        """
        self.layout = layout
        self.cast_codes = cast_codes
        self.headers = [header_of(metadata) for _, metadata in layout.parts(buffer)]
        self._buffer_outputs = layout.outputs(buffer)
        self._cast_statuses = [weight.status_after_cast for weight in self.weights]
        self._sent_statuses_cast = -1

    def begin_gather(self, device: torch.device) -> None:
        """Prepare the tensors of all weights that a gather of the last cast sends, on `device`,
        before FSDP2 takes the bytes of any weight. Codes that casts do not keep are cast here, for
        this gather only.
        """
        cast_number = self._manager.plan.cast_number
        self._write_headers(cast_number)
        codes: Sequence[Sequence[Tensor]] = [()] * len(self._buffer_outputs)
        if self.cast_codes is not None:
            codes = self.cast_codes()
        pairs = zip(codes, self._buffer_outputs, strict=True)
        self._outgoing = [[*weight_codes, *buffer_outputs] for weight_codes, buffer_outputs in pairs]
        # Offloaded masters are cast on the CPU and sent from the GPU.
        if self._outgoing[0][0].device != device:
            self._outgoing = [[part.to(device, non_blocking=True) for part in parts] for parts in self._outgoing]
        self.sent_cast = cast_number
        if not self.outputs:
            self._share_output_storage(device)

    def _share_output_storage(self, device: torch.device) -> None:
        """Let the first gather write the outputs of all weights into one storage, which FSDP2
        allocates once the bytes arrive. Allocating and freeing a storage per output would cost the
        CPU the time of several small launches.
        """
        weights = self.weights
        world = weights[0].geometry.world
        # The gathered codes of inner shards are copied into separate memory and freed before the
        # other outputs, so they cannot share a storage with them.
        if world == 1 or not self._covers_group or any(weight.geometry.inner_shards for weight in weights):
            return
        specs = [Buffer((world * part.numel(),), dtype_name(part.dtype)) for parts in self._outgoing for part in parts]
        memory, buffers = side_by_side(specs, device)
        outputs = [[next(buffers) for _ in parts] for parts in self._outgoing]
        torch_fsdp.free([memory])
        torch_fsdp.gather_into([weight.param() for weight in weights], outputs, memory)

    def pop_outgoing(self, index: int) -> list[Tensor]:
        """Return the tensors that the current gather sends of the weight at `index`; if weights are
        merged, those of all weights. After the last weight only FSDP2 holds references to them, so
        it can free them.
        """
        outgoing = self._outgoing[index]
        if self.is_merged:
            outgoing = [part for parts in self._outgoing for part in parts]
        if self.is_merged or index == self._last_index:
            self._outgoing = []
        return outgoing

    def _write_headers(self, cast_number: int) -> None:
        """Write the current statuses of all weights into their headers, where they differ from what
        the headers contain. All are written before the first weight is sent, since FSDP2 may copy
        its bytes before it asks for the next weight.
        """
        has_sent_this_cast = self._sent_statuses_cast == cast_number
        header_statuses = self._sent_statuses if has_sent_this_cast else self._cast_statuses
        self._sent_statuses = shard_statuses(self.weights)
        self._sent_statuses_cast = cast_number
        for header, old_status, new_status in zip(self.headers, header_statuses, self._sent_statuses, strict=True):
            # Each write is a kernel launch.
            if old_status != new_status:
                header[0].fill_(new_status)

    # -- bytes that all ranks sent

    @torch.no_grad()
    def _gather_bytes_again(self) -> None:
        """Gather the bytes of the last cast into the outputs that FSDP2 has gathered into."""
        ranks = Group.of(self.weights[0].shard_mesh)
        self.begin_gather(self.outputs[0][0].device)
        for name, outputs, parts in zip(self.names, self.outputs, self._outgoing, strict=True):
            for output, part in zip(outputs, parts, strict=True):
                with torch_fsdp.unversioned([output]):
                    ranks.all_gather_into(output, part, what=f"the bytes of {name}, which was written to")
        self._outgoing = []

    def finish_gather(self) -> None:
        """Finish a gather, once all bytes have arrived. If the headers say that all ranks have
        written masters, cast and gather again.

        Copies the gathered scales into the buffers that products read, and marks all weights as
        readable unless this rank has written to them since their bytes were sent.
        """
        assert self.metadata is not None
        manager = self._manager
        # Another gather may have made that cast already.
        if self._compare_headers() and self.sent_cast == manager.plan.cast_number:
            manager.cast_again()
        if self.sent_cast != manager.plan.cast_number:
            self._gather_bytes_again()
            self._compare_headers()
        weights = self.weights
        for weight in weights:
            param, nominal = weight.param(), weight.geometry.nominal
            gathered_dtype = param.param_dtype or param.orig_dtype
            if gathered_dtype != nominal:
                raise RuntimeError(f"{weight.name} was cast for {nominal} and is gathered as {gathered_dtype}")
        self.metadata.fill()
        if self.metadata.gathered_inner_codes:
            torch_fsdp.free(self.metadata.gathered_inner_codes)
        self.end_round()
        gathered_together([weight.validity for weight in weights])
        # If optimizers step inside a backward pass, that pass continues to read the weights of its
        # forward pass, although their masters have changed.
        if not manager.plan.param_groups.is_stepping_in_backward:
            self._refuse_reads_of_late_writes(weights)
        for weight in weights:
            shown = None if weight.presentation is AS_QUANTIZED_WEIGHT else weight.shown
            if shown is not None and weight.unsharded is not None:
                weight.presentation.refill(shown, weight.unsharded)

    def _refuse_reads_of_late_writes(self, weights: Sequence[FSDPWeight]) -> None:
        """Let reads raise for weights that were written to after their bytes were sent. Headers did
        not report these writes.
        """
        plain_written = torch_fsdp.has_plain_writes(self._group())
        written = self._manager.plan.written
        for weight, sent_status in zip(weights, self._sent_statuses, strict=True):
            if plain_written or (weight.name in written and sent_status is ShardStatus.CLEAN):
                weight.refuse_reads()

    def buffers_over(self, index: int, outputs: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the buffers of a weight, keyed by name, over the `outputs` of its first gather,
        and the additional memory that FSDP2 must allocate and free with the weight.

        Codes and scalars are views of the gathered bytes. Scales, and codes of inner shards, are
        copied into separate buffers in the layout that products read. The first weight returns the
        memory of these buffers for all weights.
        """
        if index == 0:
            self.outputs = [weight.param().all_gather_outputs for weight in self.weights]
            self.metadata = GatheredMetadata(self.layout.weights, self.layout.gathered_metadata(outputs), self.outputs)
        assert self.metadata is not None
        buffers = self.layout.gathered_codes(index, outputs)
        buffers |= self.metadata.scalars[index]
        buffers |= self.metadata.buffers[index]
        return buffers, self.metadata.memory if index == 0 else []

    def after_unsharded(self, index: int) -> None:
        """Called in the first gather, once the weight at `index` has its `unsharded` weight. The
        last call sets up what needs all weights: operands that products share, and merged gathers.
        """
        if index == self._last_index:
            unsharded = [weight.unsharded for weight in self.weights]
            self._operands = GatheredOperands.by_format([weight.state for weight in unsharded if weight is not None])
            self._merge_params()

    def _merge_params(self) -> None:
        """Let FSDP2 gather all weights as one parameter from the next gather on."""
        weights = self.weights
        # An FSDPParamGroup notifies one ParamGroup, which does not know the weights of another.
        if weights[0].geometry.world > 1 and self._covers_group:
            torch_fsdp.merge_params([weight.param() for weight in weights])
            self.is_merged = True

    def end_round(self) -> None:
        """Free operands that no product has taken (`GatheredOperands.end_round`)."""
        for operands in self._operands:
            operands.end_round()

    def convert(self, formats: Mapping[str, FormatSpec]) -> None:
        """Set the formats of weights, keyed by name, for later casts. The next gather allocates
        memory as the first one did.
        """
        self.metadata = None
        self._operands = []
        self.outputs = []
        self.is_merged = False
        for weight in self.weights:
            weight.convert(formats.get(weight.name, weight.format))

    def _compare_headers(self) -> bool:
        """Return True if all ranks report in the headers of the last gather that they have written
        to one of the weights, so that all must cast again. Raises RuntimeError on all ranks if only
        some have written to it.
        """
        assert self.metadata is not None
        # `cat` copies. FSDP2 may free the gathered headers before they are read.
        headers = torch.cat(self.metadata.headers)
        return self._status.compare_headers(self.names, self._sent_statuses, headers)


class ParamGroups:
    """All parameter groups of FSDP2 in a prepared model. They are resharded after optimizer steps,
    so that the next forward pass gathers the bytes of the next cast.

    Attributes:
        prepared: the groups that gather prepared weights. Empty until `find`, then fixed.
    """

    def __init__(self) -> None:
        self.prepared: list[ParamGroup] = []
        # All FSDPParamGroups of the model. Set by `find`.
        self._groups: list[weakref.ref[Any]] = []
        # The FSDPParamGroups whose gathers are tracked: those with weights that this model has
        # prepared, and those without any prepared weight. Groups with weights that only another
        # call of `prepare` has prepared are left out. Set by `find`.
        self._tracked: list[weakref.ref[Any]] = []
        # The number of the backward pass inside which an optimizer has stepped, from a gradient
        # hook. None after the next cast.
        self._backward_with_step: int | None = None
        # FSDP2's state of one module of the model. Set by `find`.
        self._state: Callable[[], Any] = lambda: None

    def find(self, model: nn.Module, weights: Collection[FSDPWeight], status: GatherStatus) -> None:
        """Find the groups of a sharded model, and which of `weights` each of them gathers. A call
        after one that found too few groups replaces its result.
        """
        state = torch_fsdp.state_of(model)
        if state is not None:
            self._state = weakref.ref(state)
        fsdp_groups = list(torch_fsdp.groups(model))
        self._groups = [weakref.ref(group) for group in fsdp_groups]
        self._tracked = []
        self.prepared = []
        for group in fsdp_groups:
            members = prepared_params(group, weights)
            if members:
                self.prepared.append(ParamGroup(group, members, status))
            elif torch_fsdp.is_plain(group):
                torch_fsdp.track_gathers(group, [], False)
            else:
                continue
            self._tracked.append(weakref.ref(group))

    @property
    def _fsdp_groups(self) -> list[Any]:
        """All FSDPParamGroups, which the model keeps alive."""
        return [group for reference in self._groups if (group := reference()) is not None]

    # -- groups that stay gathered between forward passes

    def gathered_groups(self) -> list[Any]:
        """Return the tracked groups that are gathered or whose all-gather is in flight. The same on
        all ranks.
        """
        groups = [reference() for reference in self._tracked]
        return [group for group in groups if group is not None and group.is_gathered_or_in_flight]

    def any_left_gathered(self, gathered: Sequence[Any], model: nn.Module) -> bool:
        """Return True if any of the `gathered` groups was gathered before this forward pass of
        `model`. FSDP2 has by now gathered the parameters of `model` itself for this pass, and has
        prefetched other groups.
        """
        groups_of_model = list(torch_fsdp.groups_at(model))
        was_left = False
        for group in gathered:
            # Prefetched groups are still in flight.
            is_older_gather = group.is_unsharded and group not in groups_of_model
            was_left = was_left or is_older_gather or not group.is_of_this_pass
            group.is_of_this_pass = False
        return was_left

    def gather_again_if_stale(self, gathered: Sequence[Any], cast_number: int, is_written: bool) -> None:
        """Gather the FSDPParamGroups `gathered` again if parameters were written since their
        gathers (`is_written`), or if any of them has the bytes of a cast other than `cast_number`,
        the last one. Gathers in flight are dropped; FSDP2 starts them again when a pass reaches
        their groups.
        """
        prepared = [group.param_group() for group in gathered if isinstance(group, torch_fsdp.GroupOfWeights)]
        if not is_written and all(param_group.sent_cast == cast_number for param_group in prepared):
            return
        torch_fsdp.discard_gathers(self._fsdp_groups)
        for group in gathered:
            if group.is_unsharded:
                torch_fsdp.gather_again(group)
                group.is_of_this_pass = False

    def reshard(self) -> None:
        """Reshard all gathered groups, so that the next forward pass gathers them again."""
        torch_fsdp.reshard(self._fsdp_groups)

    def discard(self) -> None:
        """Reshard all groups, and drop the gathers that a failed pass left in flight."""
        torch_fsdp.discard_gathers(self._fsdp_groups)
        self.reshard()
        self._backward_with_step = None

    # -- optimizer steps

    def after_step(self) -> None:
        """Reshard all groups after an optimizer step.

        Optimizers that step inside a backward pass, each for a few parameters, count as one step.
        The rest of that pass needs the weights of its forward pass, so groups are resharded at its
        end.
        """
        backward = torch_fsdp.backward_pass()
        if backward is None:
            self.discard()
        elif backward != self._backward_with_step:
            torch_fsdp.at_end_of_backward(self._reshard_idle)
        self._backward_with_step = backward

    @property
    def is_in_pass(self) -> bool:
        """True while a module is in its forward or backward pass."""
        return not all(map(torch_fsdp.is_idle, self._fsdp_groups))

    @property
    def is_stepping_in_backward(self) -> bool:
        """True during a backward pass, once an optimizer has stepped inside it."""
        return self._backward_with_step is not None and torch_fsdp.backward_pass() is not None

    @property
    def has_failed_backward(self) -> bool:
        """True after a backward pass that raised, until FSDP2 is reset."""
        state = self._state()
        return state is not None and torch_fsdp.has_failed_backward(state)

    def discard_failed_backward(self, model: nn.Module) -> None:
        """Discard the gathers of a backward pass that raised after an optimizer had stepped inside
        it. Called in a forward pass of `model`, whose own parameters stay, since FSDP2 has by now
        gathered them for this pass.
        """
        if self._backward_with_step is not None and torch_fsdp.backward_pass() is None:
            groups_of_model = list(torch_fsdp.groups_at(model))
            other_groups = [group for group in self._fsdp_groups if group not in groups_of_model]
            torch_fsdp.discard_gathers(other_groups)
            torch_fsdp.reshard(other_groups)
            self._backward_with_step = None

    def after_cast(self) -> None:
        """Called after a cast. A later optimizer step begins a new cast."""
        self._backward_with_step = None

    def _reshard_idle(self) -> None:
        """Reshard the groups that are in no pass. Called at the end of a backward pass. That may be
        the pass of recomputed modules (activation checkpointing) inside another one, which still
        needs its groups.
        """
        torch_fsdp.reshard(filter(torch_fsdp.is_idle, self._fsdp_groups))


def prepared_params(group: Any, weights: Collection[FSDPWeight]) -> list[tuple[FSDPWeight, Any]]:
    """Return (weight, FSDPParam) for each parameter of an FSDPParamGroup whose local tensor is the
    MasterParameter of one of `weights`.
    """
    members: list[tuple[FSDPWeight, Any]] = []
    for param in group.fsdp_params:
        weight: Any = getattr(param._sharded_local_tensor, "weight", None)
        if weight in weights:
            members.append((weight, param))
    return members
