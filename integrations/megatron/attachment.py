"""attach(): zerocast casts the masters of Megatron's DistributedOptimizer after its step.

Methods are replaced on the instances: the copy of masters into the model, what starts and finishes
a gather, and around these whatever writes, saves or loads, so that what one of them left
half-written is neither used nor saved (`guard.py`).
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zerocast import CastPlan, verify
from zerocast.cast.delayed_scaling import DelayedScaling
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.integrations.host_adapter import HostAdapter, HostPlan, Patch, Patches
from zerocast.verification.master_views import MasterViews
from zerocast.weight.owners import Claim
from zerocast.weight.validity import Use

from . import host, offload, ownership, unattached
from .checkpoint import load_plain_values, loading_scaling, refusing_quantized, saving_scaling
from .gathers import GatherLock, Gathers
from .guard import MethodGuard, followed_by
from .primary import TETensors, check_before_forward, is_primary
from .shards import OptimizerShards, bytes_not_sent, collect, elements_without_owner, read_masters
from .validate import has_stepped, validate


class SharePlan(HostPlan):
    """The casts of the part of an optimizer that one group of ranks divides."""

    def __init__(self, shards: OptimizerShards, te_tensors: TETensors, gathers: Gathers, guard: MethodGuard) -> None:
        def before_cast() -> None:
            gathers.mark_due()
            gathers.bring_weights_back()
            te_tensors.locate()

        def before_reading() -> None:
            gathers.start_due()
            te_tensors.locate_copies()

        super().__init__(
            HostAdapter(
                owner="an attachment to Megatron-Core",
                group=shards.group,
                names=shards.names,
                weights=shards.weights,
                masters=shards.masters,
                starts=shards.starts,
                plain=list(shards.plain.values()),
                before_cast=before_cast,
                before_reading=before_reading,
                gather=lambda _: gathers.start(),
                validity=guard.validity,
            )
        )
        self.shards, self.gathers, self._te_tensors, self._guard = shards, gathers, te_tensors, guard
        before = shards.detached.delayed.get(shards.share.suffix) if shards.detached is not None else None
        if before is None:
            self.plan.delayed.broadcast(shards.group)
        else:
            self.plan.delayed.load_state_dict(before.state_dict())
            self.plan.delayed.unseeded = before.unseeded

    def read_masters(self) -> None:
        """Make masters of the model."""
        self._te_tensors.locate()
        read_masters(self.shards)

    def patches(self) -> Iterator[Patch]:
        """The methods that gather, and delayed scaling in the optimizer's states."""
        one, share, delayed, rank = self.shards.optimizer, self.shards.share, self.plan.delayed, self.plan.group.rank
        yield Patch(one, "sharded_state_dict", saving_scaling(one, share, delayed, rank))
        is_preparing = lambda: self._guard.is_preparing  # noqa: E731
        yield Patch(one, "load_state_dict", loading_scaling(one, share, delayed, rank, is_preparing))
        yield from self.gathers.patches(self.plan.backend)
        yield Patch(self.plan.validity, "finish", self.gathers.wait_for)


class OptimizerPlan:
    """The casts of one optimizer: a plan for each group of ranks that divides a part of it."""

    def __init__(self, plans: Sequence[SharePlan], guard: MethodGuard) -> None:
        self.plans, self.optimizer, self._guard = list(plans), plans[0].shards.optimizer, guard

    def cast(self) -> None:
        """Cast all masters as they are now; the host gathers the bytes. Collective."""
        for one in self.plans:
            one.cast()

    def refresh(self) -> None:
        """Cast and gather masters that were loaded or written by hand. Collective."""
        for one in self.plans:
            one.refresh()

    def leave_memory(self) -> None:
        """Keep no memory in use that the host has moved masters out of."""
        for one in self.plans:
            one.leave_memory()

    def patches(self) -> Iterator[Patch]:
        """The methods that cast, gather and make masters of the model."""
        one, guard, owns = self.optimizer, self._guard, ownership.of(self.optimizer)
        copy_model = guard.writing(self._copying_model(), Use.STEP, "reading masters from the model", masters=True)
        cast = guard.writing(self.cast, Use.STEP, "a cast", masters=False)
        yield Patch(owns.copier(one), "_copy_main_params_to_model_params", cast)
        for owner, name in owns.reads(one):
            yield Patch(owner, name, copy_model)
        yield from offload.patches(one)
        if hasattr(one, "offload_to_cpu"):  # masters and moments, while a model generates
            yield Patch(one, "offload_to_cpu", followed_by(one.offload_to_cpu, self.leave_memory))
        for plan in self.plans:
            yield from plan.patches()

    def _copying_model(self) -> Callable[..., None]:
        """The host's method that makes masters of the model or of a state dict, then `refresh`."""
        read_given = offload.reading_given_values(self.optimizer)

        @torch.no_grad()
        def copy_model(state_dict: Any = None) -> None:
            if state_dict is not None:
                read_given(state_dict)
            else:
                for one in self.plans:
                    one.read_masters()
            self.refresh()

        return copy_model


class Attachment:
    """An attachment to Megatron-Core, as `attach` returns it.

    `plans` are the CastPlans, one for each group of ranks that divides masters of one optimizer,
    also where all parameters are plain.
    """

    def __init__(self, plans: Sequence[OptimizerPlan], guard: MethodGuard) -> None:
        self._optimizer_plans, self._guard = list(plans), guard
        self.plans: list[CastPlan] = [one.plan for one in self._share_plans()]
        self._optimizers: list[Any] = []  # while this is attached
        self._patches = Patches()

    def refresh(self) -> None:
        """Cast, gather and transpose masters that were written by hand. Collective.

        The optimizer does this by itself when it loads a checkpoint or reads its masters from the
        model. RuntimeError after a step that raised half-way: its masters are not worth a cast.
        """
        self._check_attached()
        self._guard.refresh([one.refresh for one in self._optimizer_plans])

    def master_views(self) -> Iterator[MasterViews]:
        """The masters of all parameters, one source an optimizer, for `zerocast.verify`.

        Bytes that no gather has brought since the last cast are gathered first, as the next forward
        pass would.
        """
        self._check_attached()
        self._guard.check(Use.VERIFY)
        for one in self._share_plans():
            yield from one.master_views()

    def detach(self) -> None:
        """Give the host its own methods back.

        Those that would write over quantized weights raise until `attach`. The model stays as it is
        and can be read. Collective where gathers overlap: those of the last step are finished
        first.
        """
        delayed: dict[int, dict[str, DelayedScaling]] = {id(optimizer): {} for optimizer in self._optimizers}
        for one in self._share_plans():
            if not self._guard.validity.partial:
                one.gathers.start_due()
            delayed[id(one.shards.optimizer)][one.shards.share.suffix] = one.plan.delayed
        try:
            self._patches.close()
        finally:  # also where masters that return from the host find no memory
            for optimizer in self._optimizers:
                if unattached.owns_quantized_weights(optimizer):
                    state = unattached.DetachedState(delayed[id(optimizer)], self._guard.validity)
                    unattached.refuse(optimizer, state)
            self.plans, self._optimizers, self._optimizer_plans = [], [], []

    def _share_plans(self) -> list[SharePlan]:
        return [plan for one in self._optimizer_plans for plan in one.plans]

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
        self._optimizers = list({id(one): one for one in (optimizer, *distributed)}.values())
        claims: weakref.WeakValueDictionary[int, Claim] = weakref.WeakValueDictionary()
        claims.update((id(param), one.claim) for one in self._share_plans() for param in one.shards.params)
        modules = [chunk.module for chunk in chunks]
        saves = [Patch(one, "sharded_state_dict", refusing_quantized(one.sharded_state_dict)) for one in modules]
        for chunk in chunks:
            for remove in (
                *load_plain_values(chunk, claims),
                *check_before_forward(chunk, lambda: self._guard.check(Use.READ)),
            ):
                patches.callback(remove)
        unattached.lift(patches, self._optimizers)
        for one in self._optimizer_plans:
            patches.apply(one.patches())
        refreshes = {id(one.optimizer): one.refresh for one in self._optimizer_plans}
        patches.apply(self._guard.patches(optimizer, distributed, refreshes, self._after_step(verify_every)))
        patches.apply(saves)
        self._patches = patches.pop_all()

    def _after_step(self, verify_every: int | None) -> Callable[[], None]:
        """Follow a step: verify every so many, with a VerificationError on every rank."""
        taken = 0

        def after_step() -> None:
            nonlocal taken
            taken += 1
            if verify_every is not None and taken % verify_every == 0:
                verify(self).raise_for_differences()

        return after_step


def attach(optimizer: Any, ddp_chunks: Any, verify_every: int | None = None) -> Attachment:
    """Let zerocast cast the quantized weights of `ddp_chunks`, whose masters `optimizer` owns.

    `optimizer` is what `get_megatron_optimizer` returned, chained or not; `ddp_chunks` the
    DistributedDataParallel or the list of them. Both were made inside `quantized_params()`. Call it
    on every rank, before the first step and before a checkpoint is loaded. `verify_every` compares
    all live bytes with an unsharded cast of the masters after every so many steps, as
    `zerocast.verify` does, and raises VerificationError on every rank of the data-parallel group if
    any differ.

    Raises, on every rank of a data-parallel group if on any: ValueError for settings that are not
    supported, for a byte that a rank casts and does not send, for elements that nobody owns;
    TypeError for quantized weights of another library; RuntimeError for a second attachment, an
    optimizer that has stepped without one, and a host without the names that are looked for.
    """
    chunks = list(ddp_chunks) if isinstance(ddp_chunks, (list, tuple, nn.ModuleList)) else [ddp_chunks]
    validate(optimizer, chunks, verify_every)
    with Patches() as patches:
        if any(is_primary(param) for chunk in chunks for param in chunk.parameters()):
            for one in host.distributed_optimizers(optimizer):
                offload.keep_on_host(one, patches)
        shards = collect(optimizer, chunks)
        attachment = Attachment(*plan(shards, patches))
        attachment.patch(patches, optimizer, [one.optimizer for one in shards], chunks, verify_every)
    return attachment


def plan(shards: Sequence[OptimizerShards], patches: Patches) -> tuple[list[OptimizerPlan], MethodGuard]:
    """One plan for each share of each optimizer, none where all weights are plain, and their guard.
    Collective.

    What is wrong with experts raises on all ranks of the dense layers, whose share is the first.
    """
    again, quantized = any(one.detached is not None for one in shards), any(one.weights for one in shards)
    partial = [one.detached.validity for one in shards if one.detached is not None and one.detached.validity.partial]
    guard, lock = MethodGuard(*partial[:1]), GatherLock()
    plans: dict[int, list[SharePlan]] = {}  # by optimizer
    for one in shards:
        problem: Exception | None = None
        try:
            _check_together(one, again and not one.weights)
            if quantized:
                te_tensors = TETensors(one.names, one.params, one.weights)
                patches.callback(te_tensors.release)
                gathers = Gathers(one.bucket_groups, lock, guard)
                plans.setdefault(id(one.optimizer), []).append(SharePlan(one, te_tensors, gathers, guard))
        except (TypeError, ValueError, RuntimeError) as error:
            if one.share.group is shards[0].share.group:
                raise
            problem = error
        if one.share.group is not shards[0].share.group:
            validate_across_ranks(shards[0].group, [], problem, "attaches zerocast to experts")
    return [OptimizerPlan(some, guard) for some in plans.values()], guard


def _check_together(shards: OptimizerShards, may_have_stepped: bool) -> None:
    """Exchange what may be wrong on one rank alone: all ranks of the group raise, or none does.

    An optimizer of plain parameters beside one that was detached has stepped under that attachment.
    """
    problem: Exception | None = None
    if shards.detached is None and not may_have_stepped and has_stepped(shards.optimizer):
        problem = RuntimeError("the optimizer has stepped or was loaded already: attach before")
    elif wrong := bytes_not_sent(shards):
        problem = ValueError(wrong)
    validate_across_ranks(shards.group, shards.names, problem, "attaches zerocast")
    if wrong := elements_without_owner(shards):
        raise ValueError(wrong)
