"""attach(): zerocast casts the masters of Megatron's DistributedOptimizer after its step.

`attach` replaces methods of instances, from top to bottom, so that a method that is named twice is
wrapped twice. Everything depends on the first: Megatron's step calls it after the inner step.

    each distributed optimizer inside `optimizer`
      _copy_main_params_to_model...   is the cast; then Megatron starts the gathers
      _copy_model_params_to_main...,  read masters from the model, then cast and gather
        reload_model_params
      state_dict, restore_from_cpu    under CPU offload: drops settings; leaves offloaded moments
      offload_to_cpu                  also drops references to the masters' device memory
      sharded_state_dict,             also save and load the state of delayed scaling
        load_state_dict
    each bucket group
      start_param_sync,               make columnwise copies when the bytes have arrived, one thread
        finish_param_sync             at a time
      _post_param_sync                does nothing: the copies of TransformerEngine's tensors exist
    each distributed optimizer that saves shards
      _set_main_param_and_...,        keep step numbers; moments are saved without their scale
        _get_main_param_and_...
      sharded_state_dict              corrects offsets in `fully_reshardable` checkpoints
    `optimizer` and each distributed optimizer
      step_with_ready_grads           an exception in it leaves the weights partial, and is raised
                                      on all ranks that share masters
      step, state_dict, save_...      raise unless the weights are valid for it
      sharded_state_dict              raises as well, or prepares the template of a load
      load_...                        also cast and gather the loaded masters
    each model chunk
      sharded_state_dict              entries raise if saved or loaded without `dequantize_`
      hooks of modules                cast loaded values; check weights before a forward pass

Weights that an interrupted call left partly written are neither used nor saved (`guard.py`).
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zerocast import CastPlan, verify
from zerocast.cast.delayed_scaling import DelayedScaling
from zerocast.cast.host import CastDriver, Host
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.integrations.patches import Patch, Patches
from zerocast.verification.master_views import MasterViews
from zerocast.weight.owners import Claim
from zerocast.weight.validity import Use, debugging

from . import host, offload, optimizer_kinds, unattached
from .checkpoint import load_plain_values, loading_scaling, refusing_quantized, saving_scaling
from .gathers import GatherLock, Gathers
from .guard import MethodGuard, followed_by, raising_on_all
from .primary import TETensors, check_before_forward, is_primary
from .shards import OwnedShare, bytes_not_sent, collect, elements_without_owner, read_masters
from .validate import has_stepped, validate


class ShareDriver(CastDriver):
    """The casts of the part of an optimizer that one group of ranks divides.

    Attributes:
        shards: the weights, masters and bucket groups of this part, as `collect` found them.
        gathers: the all-gathers of the part's byte buffers.
    """

    def __init__(self, shards: OwnedShare, te_tensors: TETensors, gathers: Gathers, guard: MethodGuard) -> None:
        super().__init__(
            Host(
                owner="an attachment to Megatron-Core",
                group=shards.group,
                names=shards.names,
                weights=shards.weights,
                masters=shards.masters,
                starts=shards.starts,
                plain=list(shards.plain.values()),
                gather=gathers,
                validity=guard.validity.part(),
                raises_together=debugging(),
            )
        )
        self.shards, self.gathers, self._te_tensors, self._guard = shards, gathers, te_tensors, guard
        detached = shards.detached
        earlier_scaling = None if detached is None else detached.delayed.get(shards.share.suffix)
        if earlier_scaling is None:
            # First attachment: all ranks use the scales of rank 0, since the bytes of different
            # ranks are gathered into one weight with one scale.
            self.plan.delayed.broadcast(shards.group)
        else:
            # Attached again: continue with the scales and histories of the detached attachment, so
            # that detach() and attach() between two steps change no byte.
            self.plan.delayed.load_state_dict(earlier_scaling.state_dict())
            self.plan.delayed.unseeded = earlier_scaling.unseeded

    def read_masters(self) -> None:
        """Overwrite the masters with the model's values, dequantized where they are quantized."""
        self._te_tensors.locate()
        read_masters(self.shards)

    def patches(self) -> Iterator[Patch]:
        """Yield patches of the methods that gather, and that save and load delayed scaling."""
        optimizer, share = self.shards.optimizer, self.shards.share
        delayed, rank = self.plan.delayed, self.plan.group.rank
        is_preparing = lambda: self._guard.is_preparing  # noqa: E731
        yield Patch(optimizer, "sharded_state_dict", saving_scaling(optimizer, share, delayed, rank))
        yield Patch(optimizer, "load_state_dict", loading_scaling(optimizer, share, delayed, rank, is_preparing))
        yield from self.gathers.patches(self.plan.backend)
        # The bytes of a weight can be read while its gather is in flight (overlap_param_gather), so
        # reading them calls `before_read` first.
        yield Patch(self.plan.validity, "before_read", self.gathers.wait_for)


def _patches_of(drivers: Sequence[ShareDriver], guard: MethodGuard) -> Iterator[Patch]:
    """Yield the patches by which the drivers of one optimizer cast, gather, and overwrite the
    masters with the model's values.
    """
    optimizer = drivers[0].shards.optimizer
    kind = optimizer_kinds.kind_of(optimizer)

    def cast() -> None:
        for driver in drivers:
            driver.cast()

    def leave_memory() -> None:
        for driver in drivers:
            driver.leave_memory()

    copy_model = guard.writing(_copying_model(drivers), Use.STEP, "reading masters from the model", masters=True)
    copy_model = raising_on_all(copy_model, drivers)
    yield Patch(
        kind.copier(optimizer),
        "_copy_main_params_to_model_params",
        guard.writing(cast, Use.STEP, "a cast", masters=False),
    )
    for owner, name in kind.reads(optimizer):
        yield Patch(owner, name, copy_model)
    yield from offload.patches(optimizer)
    if hasattr(optimizer, "offload_to_cpu"):
        # The host moves masters and moments to the CPU while a model generates. A view that a plan
        # still held would keep their device memory allocated.
        yield Patch(optimizer, "offload_to_cpu", followed_by(optimizer.offload_to_cpu, leave_memory))
    for driver in drivers:
        yield from driver.patches()


def _copying_model(drivers: Sequence[ShareDriver]) -> Callable[..., None]:
    """Wrap the host's method that reads masters from the model or from a state dict. It then casts
    and gathers them: quantizing a dequantized value again need not give the same bytes.
    """
    read_given = offload.reading_given_values(drivers[0].shards.optimizer)

    @torch.no_grad()
    def copy_model(state_dict: Any = None) -> None:
        if state_dict is not None:
            read_given(state_dict)
        else:
            for driver in drivers:
                driver.read_masters()
        for driver in drivers:
            driver.refresh()

    return copy_model


class Attachment:
    """An attachment to Megatron-Core, as `attach` returns it.

    Attributes:
        plans: the CastPlans, one for each group of ranks that divides masters of one optimizer. An
            optimizer whose parameters are all plain has one too. Empty after `detach`.
    """

    def __init__(self, drivers: Sequence[ShareDriver], guard: MethodGuard) -> None:
        # The drivers of each optimizer follow each other. Empty after `detach`.
        self._drivers = list(drivers)
        self._guard = guard
        self.plans: list[CastPlan] = [driver.plan for driver in drivers]
        # The optimizer given to `attach` and those inside it. Empty before `patch` and after
        # `detach`, which `_check_attached` relies on.
        self._optimizers: list[Any] = []
        # The replaced methods of the host. Closing it gives them back.
        self._patches = Patches()

    def refresh(self) -> None:
        """Cast, gather and transpose masters that were written by hand. Collective.

        The optimizer does this by itself when it loads a checkpoint or reads its masters from the
        model. Raises RuntimeError after a step that failed partway: some masters are still old.
        """
        self._check_attached()
        refresh = raising_on_all(self._guard.refresh, self._drivers)
        refresh(self._drivers)

    def master_views(self) -> Iterator[MasterViews]:
        """Yield the masters of all parameters, one source per optimizer, for `zerocast.verify`.

        Bytes that were not gathered since the last cast are gathered first, as in the next forward
        pass.
        """
        self._check_attached()
        for driver in self._drivers:
            yield from driver.master_views()

    def detach(self) -> None:
        """Give the host its own methods back.

        Methods of the host that would write over quantized weights raise until the next `attach`.
        The model stays as it is and can be read. Collective where gathers overlap: the gathers of
        the last step are finished first.
        """
        delayed: dict[int, dict[str, DelayedScaling]] = {id(optimizer): {} for optimizer in self._optimizers}
        for driver in self._drivers:
            # Partial weights may come from a rank that died: a collective would then never end.
            if not self._guard.validity.partial:
                driver.gathers.start_due()
            delayed[id(driver.shards.optimizer)][driver.shards.share.suffix] = driver.plan.delayed
        try:
            self._patches.close()
        finally:
            # Closing copies offloaded masters back to the device, which may run out of memory. Even
            # then the host's own copy must not overwrite the quantized weights.
            for optimizer in self._optimizers:
                if unattached.owns_quantized_weights(optimizer):
                    state = unattached.DetachedState(delayed[id(optimizer)], self._guard.validity)
                    unattached.refuse(optimizer, state)
            self.plans, self._optimizers, self._drivers = [], [], []

    def _check_attached(self) -> None:
        if not self._optimizers:
            raise ValueError(
                "this attachment was detached: nothing casts its masters; attach(optimizer, ddp_chunks) again"
            )

    def patch(
        self,
        patches: Patches,
        optimizer: Any,
        distributed: Sequence[Any],
        chunks: Sequence[Any],
        verify_every: int | None,
    ) -> None:
        """Replace the methods of the host; `detach` gives them back."""
        # An optimizer that is not a chain is also its only distributed optimizer.
        self._optimizers = list({id(owner): owner for owner in (optimizer, *distributed)}.values())
        # The load hooks of a chunk look claims up here. Values are weak, so that the hooks keep no
        # claim alive once its attachment is gone.
        claims: weakref.WeakValueDictionary[int, Claim] = weakref.WeakValueDictionary()
        for driver in self._drivers:
            assert driver.claim is not None
            claims.update(dict.fromkeys(map(id, driver.shards.params), driver.claim))
        modules = [chunk.module for chunk in chunks]
        saves = [
            Patch(module, "sharded_state_dict", refusing_quantized(module.sharded_state_dict)) for module in modules
        ]
        for chunk in chunks:
            for remove in (
                *load_plain_values(chunk, claims),
                *check_before_forward(chunk, lambda: self._guard.check(Use.READ)),
            ):
                patches.callback(remove)
        # The methods that raise are removed first: the patches below wrap the host's own methods.
        unattached.lift(patches, self._optimizers)
        for _, of_optimizer in itertools.groupby(self._drivers, lambda driver: id(driver.shards.optimizer)):
            patches.apply(_patches_of(list(of_optimizer), self._guard))
        # The guard comes last, so that it surrounds all that the plans have replaced.
        patches.apply(self._guard.patches(optimizer, distributed, self._drivers, self._after_step(verify_every)))
        patches.apply(saves)
        self._patches = patches.pop_all()

    def _after_step(self, verify_every: int | None) -> Callable[[], None]:
        """Return the function that is called after each step and verifies every `verify_every`
        steps.

        It raises VerificationError on every rank.
        """
        steps = 0

        def after_step() -> None:
            nonlocal steps
            steps += 1
            if verify_every is not None and steps % verify_every == 0:
                verify(self).raise_for_differences()

        return after_step


def attach(optimizer: Any, ddp_chunks: Any, verify_every: int | None = None) -> Attachment:
    """Let zerocast cast the quantized weights of `ddp_chunks`, whose masters `optimizer` owns.

    `optimizer` was returned by `get_megatron_optimizer`, chained or not; `ddp_chunks` is the
    DistributedDataParallel or a list of them. Both must have been built inside
    `quantized_params()`. Call it on every rank, before the first step and before a checkpoint is
    loaded. Every `verify_every` steps all live bytes are compared with an unsharded cast of the
    masters (`zerocast.verify`), and VerificationError is raised on every rank of the data-parallel
    group if any differ.

    Raises, on every rank of a data-parallel group if on any: ValueError for settings that are not
    supported, for a byte that a rank casts and does not send, for elements that no rank owns;
    TypeError for quantized weights of a different library; RuntimeError for a second attachment, an
    optimizer that has already stepped, and a Megatron version without a needed name.
    """
    chunks = list(ddp_chunks) if isinstance(ddp_chunks, (list, tuple, nn.ModuleList)) else [ddp_chunks]
    with Patches() as patches, host.known_api():
        distributed = validate(optimizer, chunks, verify_every)
        if any(is_primary(param) for chunk in chunks for param in chunk.parameters()):
            # Before `collect`, which then finds the masters in CPU memory.
            for inner in distributed:
                offload.keep_on_cpu(inner, patches)
        shards = collect(distributed, chunks)
        drivers, guard = build_drivers(shards, patches)
        attachment = Attachment(drivers, guard)
        attachment.patch(patches, optimizer, distributed, chunks, verify_every)
    return attachment


def build_drivers(shards: Sequence[OwnedShare], patches: Patches) -> tuple[list[ShareDriver], MethodGuard]:
    """Build one driver for each share of each optimizer, in order, and their guard. Collective.

    A model whose weights are all plain gets no drivers. An error about experts raises on all ranks
    of the dense layers, whose share is the first.
    """
    was_detached = any(shard.detached is not None for shard in shards)
    has_quantized = any(shard.weights for shard in shards)
    # Weights that the last attachment left partial stay partial for the new one.
    detached = [shard.detached.validity for shard in shards if shard.detached is not None]
    partial = [validity for validity in detached if validity.partial]
    guard, lock = MethodGuard(*partial[:1]), GatherLock()
    drivers: list[ShareDriver] = []
    dense = shards[0]
    for shard in shards:
        is_dense = shard.share.group is dense.share.group
        problem: Exception | None = None
        try:
            _check_together(shard, was_detached and not shard.weights)
            if has_quantized:
                te_tensors = TETensors(shard.names, shard.params, shard.weights)
                patches.callback(te_tensors.release)
                gathers = Gathers(shard.bucket_groups, te_tensors, lock, guard)
                drivers.append(ShareDriver(shard, te_tensors, gathers, guard))
        except (TypeError, ValueError, RuntimeError) as error:
            # All ranks of the dense group have raised together already.
            if is_dense:
                raise
            problem = error
        # The ranks with the same experts raise together. The other ranks of the dense group would
        # continue and wait in their next collective, so the error is raised on them too.
        if not is_dense:
            validate_across_ranks(dense.group, [], problem, "attaches zerocast to experts")
    return drivers, guard


def _check_together(shards: OwnedShare, may_have_stepped: bool) -> None:
    """Exchange errors that only one rank may find: all ranks of the group raise, or none does.

    `may_have_stepped` is true for an optimizer of plain parameters in a chain that was detached: it
    has stepped under the earlier attachment.
    """
    problem: Exception | None = None
    if shards.detached is None and not may_have_stepped and has_stepped(shards.optimizer):
        problem = RuntimeError("the optimizer has stepped or was loaded already: attach before")
    elif wrong := bytes_not_sent(shards):
        problem = ValueError(wrong)
    validate_across_ranks(shards.group, shards.names, problem, "attaches zerocast")
    if wrong := elements_without_owner(shards):
        raise ValueError(wrong)
