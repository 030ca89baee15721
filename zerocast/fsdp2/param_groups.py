"""ParamGroup: the prepared weights that FSDP2 gathers together, and the bytes that it sends.
ParamGroups: all of FSDP2's parameter groups in a prepared model, and which of them stay gathered.
"""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerocast.distributed.group import ONE_PROCESS, Group
from zerocast.distributed.rank_report import ShardStatus
from zerocast.formats import FormatSpec
from zerocast.formats.dtypes import dtype_name
from zerocast.formats.layout import Buffer
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.gather_layout import GatheredMetadata, GatherLayout, header_of, side_by_side
from zerocast.fsdp2.gather_status import GatherStatus
from zerocast.fsdp2.weight import AS_QUANTIZED_WEIGHT, FSDPWeight, living, shard_statuses
from zerocast.weight.gathered_operands import GatheredOperands
from zerocast.weight.validity import gathered_together


class ParamGroup:
    """One of FSDP2's parameter groups (an FSDPParamGroup), and the bytes of its weights.

    Attributes:
        names: the names of its prepared weights, in the order of its gather. A weight's `index` is
            its index.
        sent: the number of the cast whose bytes the last gather sent. -1 before the first one.
        layout: the layout of the bytes that are sent. Another one after a switch of formats.
        metadata: the gathered bytes other than codes. None before the first gather, and after a
            switch of formats until the next one.
        headers: the header of each weight, int32 `[2]`, a view of the bytes that are sent.
        is_merged: True if FSDP2 gathers all its weights as the first one (`GroupOfWeights`): after
            the first gather of a layout over several ranks.
        outputs: the tensors that FSDP2 gathers into, of each weight. Empty before the first gather,
            and after a switch of formats until the next one.
        cast_codes: returns the codes of each weight, by direction, for one gather. None if casts
            keep the codes with the remaining bytes that are sent.
    """

    layout: GatherLayout
    headers: list[Tensor]
    cast_codes: Callable[[], Sequence[Sequence[Tensor]]] | None

    def __init__(self, group: Any, members: Sequence[tuple[FSDPWeight, Any]], status: GatherStatus) -> None:
        """Take over the gathers of `members`, weights with their FSDPParams."""
        self._group: Callable[[], Any] = weakref.ref(group)
        self._covers_group = torch_fsdp.take_over_group(group, self, [param for _, param in members])
        self._status = status
        self._weights = [weakref.ref(weight) for weight, _ in members]
        self.names = tuple(weight.name for weight, _ in members)
        self.sent = -1
        self._last_index = len(members) - 1
        for index, (weight, param) in enumerate(members):
            weight.adopt(self, index, param)
        # For each weight, from `lay_out` on: the tensors that are sent in addition to codes that
        # are not kept, the status that a cast leaves in its header, and the status of the last
        # gather.
        self._kept: list[tuple[Tensor, ...]] = []
        self._statuses_of_cast: list[ShardStatus] = []
        self._statuses: list[ShardStatus] = []
        # The number of the cast after which a gather has last written headers.
        self._statuses_after = -1
        # The tensors that the current gather sends of each weight, until FSDP2 has taken them.
        self._outgoing: list[list[Tensor]] = []
        # Operands that products read in place of gathered codes. None before the first gather, and
        # after a switch of formats until the next one.
        self._operands: list[GatheredOperands] = []
        self.metadata: GatheredMetadata | None = None
        self.is_merged = False
        self.outputs: list[list[Tensor]] = []

    @property
    def weights(self) -> list[FSDPWeight]:
        """The weights, which the model keeps alive."""
        return living(self._weights)

    @property
    def is_unsharded(self) -> bool:
        """True while its weights are gathered."""
        return bool(self._group().is_unsharded)

    @property
    def replicas(self) -> Group:
        """The ranks that have the same shards."""
        return Group.of(torch_fsdp.replicas(self._group()) or ONE_PROCESS)

    def problem(self) -> str | None:
        """Return why quantized weights cannot be gathered by it, if so."""
        if self._group()._use_post_forward_mesh:
            return (
                "reshard_after_forward=<int> does not work with quantized weights (FSDP2 reshards only plain tensors): "
                "pass True or False"
            )
        return None

    def check_masters(self) -> None:
        """Raise RuntimeError if something has replaced a master by a plain tensor."""
        assert all(weight.local is not None for weight in self.weights)

    # -- sent

    def lay_out(
        self, layout: GatherLayout, buffer: Tensor, cast_codes: Callable[[], Sequence[Sequence[Tensor]]] | None
    ) -> None:
        """Send from `buffer`, which casts fill, uint8 `[layout.kept_bytes]` of zeros."""
        self.layout = layout
        self.cast_codes = cast_codes
        self.headers = [header_of(metadata) for _, metadata in layout.parts(buffer)]
        self._kept = layout.outputs(buffer)
        self._statuses_of_cast = [weight.status_after_cast for weight in self.weights]
        self._statuses_after = -1

    def begin_gather(self, cast: int, device: torch.device) -> None:
        """Make the tensors that a gather sends of all weights, on `device`, after cast number
        `cast`. Codes that are not kept are cast for this gather.
        """
        self._write_headers(cast)
        codes = self.cast_codes() if self.cast_codes is not None else [()] * len(self._kept)
        self._outgoing = [[*own, *kept] for own, kept in zip(codes, self._kept, strict=True)]
        if self._outgoing[0][0].device != device:
            self._outgoing = [[part.to(device, non_blocking=True) for part in parts] for parts in self._outgoing]
        self.sent = cast
        if not self.outputs:
            self._place_outputs(device)

    def _place_outputs(self, device: torch.device) -> None:
        """Let the first gather go into one memory. FSDP2 allocates it once the bytes arrive.

        Allocating and freeing a storage takes the CPU the time of several small launches.
        """
        weights = self.weights
        world = weights[0].geometry.world
        # The codes of inner shards are joined in separate memory, and freed before the rest.
        if world == 1 or not self._covers_group or any(weight.geometry.inner_shards for weight in weights):
            return
        specs = [Buffer((world * part.numel(),), dtype_name(part.dtype)) for parts in self._outgoing for part in parts]
        memory, buffers = side_by_side(specs, device)
        outputs = [[next(buffers) for _ in parts] for parts in self._outgoing]
        torch_fsdp.free([memory])
        torch_fsdp.gather_into([weight.param() for weight in weights], outputs, memory)

    def pop_outgoing(self, index: int) -> list[Tensor]:
        """Return the tensors that the current gather sends of the weight at `index`, or of all as
        the first one. After the last weight only FSDP2 keeps them.
        """
        outgoing = self._outgoing[index]
        if self.is_merged:
            outgoing = [part for parts in self._outgoing for part in parts]
        if self.is_merged or index == self._last_index:
            self._outgoing = []
        return outgoing

    def _write_headers(self, cast: int) -> None:
        """Write the statuses of all weights into their headers, if they differ from those that were
        written since cast number `cast`. All are written with the first weight, since FSDP2 may
        copy its bytes before it asks for the next one.
        """
        written = self._statuses if self._statuses_after == cast else self._statuses_of_cast
        self._statuses = shard_statuses(self.weights)
        self._statuses_after = cast
        for header, before, now in zip(self.headers, written, self._statuses, strict=True):
            if before != now:
                header[0].fill_(now)

    # -- received

    @torch.no_grad()
    def gather_bytes_again(self, cast: int) -> None:
        """Gather the bytes of another cast into the outputs that FSDP2 gathered."""
        ranks = Group.of(self.weights[0].shard_mesh)
        self.begin_gather(cast, self.outputs[0][0].device)
        for name, outputs, parts in zip(self.names, self.outputs, self._outgoing, strict=True):
            for output, part in zip(outputs, parts, strict=True):
                with torch_fsdp.unversioned([output]):
                    ranks.all_gather_into(output, part, what=f"the bytes of {name}, which was written to")
        self._outgoing = []

    def finish_gather(self) -> None:
        """Copy the gathered scales to where products read them, and allow reads of all weights."""
        assert self.metadata is not None
        weights = self.weights
        for weight in weights:
            param, nominal = weight.param(), weight.geometry.nominal
            dtype = param.param_dtype or param.orig_dtype
            if dtype != nominal:
                raise RuntimeError(f"{weight.name} was cast for {nominal} and is gathered as {dtype}")
        self.metadata.fill()
        if self.metadata.gathered_inner_codes:
            torch_fsdp.free(self.metadata.gathered_inner_codes)
        self.end_round()
        gathered_together([weight.validity for weight in weights])
        # A backward pass within which optimizers step reads the weights of its forward pass.
        if not weights[0].manager.plan.param_groups.step_goes_on:
            plain_written = torch_fsdp.has_plain_writes(self._group())
            for weight, sent in zip(weights, self._statuses, strict=True):
                # Something was written while these bytes were on their way.
                if plain_written or (weight.is_written and sent is ShardStatus.CLEAN):
                    weight.refuse_reads()
        for weight in weights:
            shown = None if weight.presentation is AS_QUANTIZED_WEIGHT else weight.shown
            if shown is not None and weight.unsharded is not None:
                weight.presentation.refill(shown, weight.unsharded)

    def buffers_over(self, index: int, outputs: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return (the buffers of a weight keyed by name, buffers that FSDP2 allocates and frees
        with it) over the `outputs` of its first gather.

        Codes and scalars stay where FSDP2 gathered them, but for codes in inner shards. Scales and
        these codes get separate buffers, in the layout that products read. The buffers of all
        weights are allocated with the first one.
        """
        if index == 0:
            self.outputs = [weight.param().all_gather_outputs for weight in self.weights]
            self.metadata = GatheredMetadata(self.layout.weights, self.layout.gathered_metadata(outputs), self.outputs)
        assert self.metadata is not None
        scales = self.metadata.scalars[index] | self.metadata.buffers[index]
        return self.layout.gathered_codes(index, outputs) | scales, self.metadata.memory if index == 0 else []

    def note_unsharded(self, index: int) -> None:
        """Called once the weight at `index` is over the memory of its gathers. After the last one,
        products can share operands.
        """
        if index == self._last_index:
            unsharded = [weight.unsharded for weight in self.weights]
            self._operands = GatheredOperands.by_format([weight.state for weight in unsharded if weight is not None])
            self._merge_params()

    def _merge_params(self) -> None:
        """Let FSDP2 gather all weights as the first one from the next gather on."""
        weights = self.weights
        # An FSDPParamGroup notifies one ParamGroup, which does not know the weights of another.
        if weights[0].geometry.world > 1 and self._covers_group:
            torch_fsdp.merge_params([weight.param() for weight in weights])
            self.is_merged = True

    def end_round(self) -> None:
        """Free operands that no product has asked for (`GatheredOperands.end_round`)."""
        for operands in self._operands:
            operands.end_round()

    def convert(self, formats: Mapping[str, FormatSpec]) -> None:
        """Cast weights into new formats, keyed by name, in later casts."""
        self.metadata = None
        self._operands = []
        self.outputs = []
        self.is_merged = False
        for weight in self.weights:
            weight.convert(formats.get(weight.name, weight.format))

    def compare_headers(self) -> bool:
        """Return True if the headers of a gather say that all ranks have written to one of the
        weights, so that all must cast again. Raises RuntimeError on all ranks if only some have.
        """
        assert self.metadata is not None
        # A copy, since FSDP2 may free the headers before they are read.
        return self._status.compare_headers(self.names, self._statuses, torch.cat(self.metadata.headers))


class ParamGroups:
    """FSDP2's parameter groups in a prepared model. They are freed after optimizer steps, so that
    the next forward pass gathers the bytes of the next cast.

    Attributes:
        prepared: the groups that gather prepared weights. Empty until FSDP2 has sharded the model.
    """

    def __init__(self) -> None:
        self.prepared: list[ParamGroup] = []
        # These groups, and those without prepared weights of any model.
        self._noted: list[weakref.ref[Any]] = []
        # All groups of the model, those without prepared weights too.
        self._groups: list[weakref.ref[Any]] = []
        # The backward pass within which an optimizer has stepped, from a gradient's hook, until the
        # next cast.
        self._stepped_in: int | None = None

    def find(self, model: nn.Module, weights: Collection[FSDPWeight], status: GatherStatus) -> None:
        """Find the groups of a sharded model, and which of `weights` each of them gathers."""
        groups = list(torch_fsdp.groups(model))
        self._groups = list(map(weakref.ref, groups))
        members = [(group, prepared_params(group, weights)) for group in groups]
        self.prepared = [ParamGroup(group, params, status) for group, params in members if params]
        plain = list(filter(torch_fsdp.is_plain, groups))
        for group in plain:
            torch_fsdp.note_gathers(group, [], False)
        self._noted = [weakref.ref(group) for group, params in members if params or group in plain]

    @property
    def _fsdp_groups(self) -> list[Any]:
        """All FSDPParamGroups, which the model keeps alive."""
        return [group for reference in self._groups if (group := reference()) is not None]

    # -- groups that are left gathered

    def begun(self) -> list[Any]:
        """Return the groups that are gathered, or whose gather has begun: the same on all ranks."""
        groups = [reference() for reference in self._noted]
        return [group for group in groups if group is not None and group.is_begun]

    def left_gathered(self, begun: Sequence[Any], model: nn.Module) -> bool:
        """Return whether the gather of any of the groups began before this forward pass of `model`,
        whose own weights FSDP2 has gathered by now, with those that are prefetched after them.
        """
        of_model = list(torch_fsdp.groups_at(model))
        left = [group for group in begun if not group.is_of_this_pass or (group.is_unsharded and group not in of_model)]
        for group in begun:
            group.is_of_this_pass = False
        return bool(left)

    def gather_old_again(self, begun: Sequence[Any], cast: int, is_written: bool) -> None:
        """Gather the groups again if parameters were written since, or if the bytes of any are of
        another cast than number `cast`. Drops gathers of a pass that failed.
        """
        sent = [group.weights().sent for group in begun if isinstance(group, torch_fsdp.GroupOfWeights)]
        if not is_written and all(number == cast for number in sent):
            return
        torch_fsdp.discard_gathers(self._fsdp_groups)
        for group in begun:
            if group.is_unsharded:
                torch_fsdp.gather_again(group)
                group.is_of_this_pass = False

    def free(self) -> None:
        """Free all groups that are gathered, so that the next forward pass gathers them again."""
        torch_fsdp.reshard(self._fsdp_groups)

    def discard(self) -> None:
        """Free all groups, and drop gathers of a pass that failed partway."""
        torch_fsdp.discard_gathers(self._fsdp_groups)
        self.free()
        self._stepped_in = None

    # -- optimizer steps

    def after_step(self) -> None:
        """Free all groups after an optimizer step.

        Optimizers that step within a backward pass, each a few parameters, take one step together.
        The rest of that pass needs the weights of its forward pass, so they are freed at its end.
        """
        backward = torch_fsdp.backward_pass()
        if backward is None:
            self.discard()
        elif backward != self._stepped_in:
            torch_fsdp.at_end_of_backward(self._free_idle)
        self._stepped_in = backward

    @property
    def is_in_pass(self) -> bool:
        """True while a module is in its forward or backward pass."""
        return not all(map(torch_fsdp.is_idle, self._fsdp_groups))

    @property
    def step_goes_on(self) -> bool:
        """True while the backward pass runs within which optimizers step."""
        return self._stepped_in is not None and torch_fsdp.backward_pass() is not None

    def before_forward(self, model: nn.Module) -> None:
        """Discard the gathers of a backward pass that raised after an optimizer had stepped within
        it. The weights of `model` itself stay, since FSDP2 has gathered them by now for this pass.
        """
        if self._stepped_in is not None and torch_fsdp.backward_pass() is None:
            of_model = list(torch_fsdp.groups_at(model))
            below = [group for group in self._fsdp_groups if group not in of_model]
            torch_fsdp.discard_gathers(below)
            torch_fsdp.reshard(below)
            self._stepped_in = None

    def after_cast(self) -> None:
        """Called after a cast. An optimizer step that follows is not part of the last one."""
        self._stepped_in = None

    def _free_idle(self) -> None:
        """Free the groups that are in no pass. Called at the end of a backward pass, which may be
        the pass of recomputed modules within another one.
        """
        torch_fsdp.reshard(filter(torch_fsdp.is_idle, self._fsdp_groups))


def prepared_params(group: Any, weights: Collection[FSDPWeight]) -> list[tuple[FSDPWeight, Any]]:
    """Return (weight, FSDPParam) of the parameters of an FSDPParamGroup whose local tensor is the
    MasterParameter of one of `weights`.
    """
    params: list[tuple[Any, Any]] = [
        (getattr(param._sharded_local_tensor, "weight", None), param) for param in group.fsdp_params
    ]
    return [(weight, param) for weight, param in params if weight in weights]
