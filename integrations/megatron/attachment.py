"""attach(): zerocast casts the masters of Megatron's DistributedOptimizer after its step.

Methods are replaced on the instances: the copy of masters into the model, what starts and finishes
a gather, and around these whatever writes, saves or loads, so that what one of them left
half-written is neither used nor saved (`guard.py`).
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from zerocast import CastPlan, verify
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.integrations.host_adapter import HostAdapter, HostPlan, Patch, Patches
from zerocast.verification.master_views import MasterViews
from zerocast.weight.owners import Claim

from . import host, offload, unattached
from .checkpoint import load_plain_values, loading_scaling, refusing_quantized, saving_scaling
from .gathers import GatherLock, Gathers
from .guard import MethodGuard, followed_by
from .primary import TETensors, check_before_forward, is_primary
from .shards import OptimizerShards, bytes_not_sent, collect, elements_without_owner, masters_from_model
from .validate import check_given_values, has_stepped, validate

ADVICE = (
    "the optimizer's step casts by itself; after masters were written by hand call attachment.refresh(), and with "
    "overlap_param_gather, before the next forward pass, ddp.start_param_sync(force_sync=True)"
)


class OptimizerPlan(HostPlan):
    """The casts of one DistributedOptimizer."""

    def __init__(self, shards: OptimizerShards, te_tensors: TETensors, gathers: Gathers, guard: MethodGuard) -> None:
        def before_cast() -> None:
            gathers.mark_due()
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
                guard=guard.writes,
                advice=ADVICE,
            )
        )
        self.shards, self.gathers, self._te_tensors, self._guard = shards, gathers, te_tensors, guard
        if shards.detached is None or shards.detached.delayed is None:
            self.plan.delayed.broadcast(shards.group)
        else:
            self.plan.delayed.load_state_dict(shards.detached.delayed.state_dict())
            self.plan.delayed.unseeded = shards.detached.delayed.unseeded

    def patches(self) -> Iterator[Patch]:
        """The methods that cast and gather, and delayed scaling in the optimizer's states."""
        one, delayed, rank, guard = self.shards.optimizer, self.plan.delayed, self.plan.group.rank, self._guard
        copier = host.ownership(one).copier(one)
        copy_model = followed_by(masters_from_model(self.shards, self._te_tensors.locate), self.refresh)
        for name, method, what, masters in (
            ("_copy_main_params_to_model_params", self.cast, "a cast", False),
            ("_copy_model_params_to_main_params", copy_model, "reading masters from the model", True),
        ):
            yield Patch(copier, name, check_given_values(one, guard.writing(method, what, masters=masters)))
        yield from offload.patches(one)
        if hasattr(one, "offload_to_cpu"):  # masters and moments, while a model generates
            yield Patch(one, "offload_to_cpu", followed_by(one.offload_to_cpu, self.leave_memory))
        yield Patch(one, "sharded_state_dict", saving_scaling(one, delayed, rank))
        yield Patch(one, "load_state_dict", loading_scaling(one, delayed, rank, lambda: guard.is_preparing))
        yield from self.gathers.patches(self.plan.backend)
        yield Patch(self.plan.freshness, "finish", self.gathers.wait_for)


class Attachment:
    """An attachment to Megatron-Core, as `attach` returns it.

    `plans` are the CastPlans, one an optimizer, also where all its parameters are plain.
    """

    def __init__(self, plans: Sequence[OptimizerPlan], guard: MethodGuard) -> None:
        self.plans: list[CastPlan] = [one.plan for one in plans]
        self._optimizer_plans, self._guard = list(plans), guard
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
        self._guard.check_complete()
        for one in self._optimizer_plans:
            yield from one.master_views()

    def detach(self) -> None:
        """Give the host its own methods back.

        Those that would write over quantized weights raise until `attach`. The model stays as it is
        and can be read. Collective where gathers overlap: those of the last step are finished
        first.
        """
        for one in () if self._guard.writes.is_partial else self._optimizer_plans:
            one.gathers.start_due()
        delayed = {id(one.shards.optimizer): one.plan.delayed for one in self._optimizer_plans}
        try:
            self._patches.close()
        finally:  # also where masters that return from the host find no memory
            for optimizer in self._optimizers:
                if unattached.owns_quantized_weights(optimizer):
                    state = unattached.DetachedState(delayed.get(id(optimizer)), self._guard.writes)
                    unattached.refuse(optimizer, state)
            self.plans, self._optimizers, self._optimizer_plans = [], [], []

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
        claims.update((id(param), one.claim) for one in self._optimizer_plans for param in one.shards.params)
        modules = [chunk.module for chunk in chunks]
        saves = [Patch(one, "sharded_state_dict", refusing_quantized(one.sharded_state_dict)) for one in modules]
        for chunk in chunks:
            for remove in (*load_plain_values(chunk, claims), *check_before_forward(chunk, self._guard.check_complete)):
                patches.callback(remove)
        unattached.lift(patches, self._optimizers)
        for one in self._optimizer_plans:
            patches.apply(one.patches())
        refreshes = {id(one.shards.optimizer): one.refresh for one in self._optimizer_plans}
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
    """One plan for each optimizer, none where all weights are plain, and their guard.
    Collective.
    """
    again = any(one.detached is not None for one in shards)
    for one in shards:
        _check_together(one, again and not one.weights)
    partial = [one.detached.writes for one in shards if one.detached is not None and one.detached.writes.is_partial]
    guard, lock = MethodGuard(*partial[:1]), GatherLock()
    if not any(one.weights for one in shards):
        return [], guard
    plans = []
    for one in shards:
        te_tensors = TETensors(one.names, one.params, one.weights)
        patches.callback(te_tensors.release)
        plans.append(OptimizerPlan(one, te_tensors, Gathers(one.bucket_groups, lock, guard), guard))
    return plans, guard


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
