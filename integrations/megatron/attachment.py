"""attach(): zerocast casts the masters of Megatron's DistributedOptimizer, and makes columnwise copies after its all-gathers.

Methods are replaced on the instances: the copy of masters into the model, what starts and finishes a gather, and around these
whatever writes, saves or loads, so that what one of them left half-written is neither used nor saved (`guard.py`).
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zerocast import CastPlan, verify
from zerocast.cast.delayed_scaling import DelayedScaling
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.group import Group
from zerocast.verification.master_views import MasterViews
from zerocast.weight.write_guard import WriteGuard

from . import host, refusal, te_tensors, unattached
from .checkpoint import load_plain_values, refusing_quantized, saving_unpadded
from .gathers import Turns, after_gather_of, completing, nothing, primary_of
from .guard import Guard
from .inner_state import without_steps
from .primary import is_primary, weight_of
from .scaling_state import ScalingState
from .shards import Shards, misplaced, shards_of, uncovered
from .sources import Source, masters_from_model
from .te_tensors import TETensors
from .unattached import Left

ADVICE = (
    "the optimizer's step casts by itself; after masters were written by hand call attachment.refresh(), and with "
    "overlap_param_gather, before the next forward pass, ddp.start_param_sync(force_sync=True)"
)


class Attachment:
    """What `attach` returns. `plans` are the CastPlans, one an optimizer, also where all its parameters are plain."""

    def __init__(self, writes: WriteGuard | None = None) -> None:
        self.plans: list[CastPlan] = []
        self._guard = Guard(writes)
        self._turns = Turns(self._guard.check_complete)
        self._sources: list[Source] = []
        self._optimizers: list[Any] = []  # those that refuse when this is detached
        self._scaling: dict[int, DelayedScaling] = {}  # by id of the optimizer
        self._replaced: list[tuple[Any, str]] = []
        self._refreshes: dict[int, Callable[[], None]] = {}  # by id of the optimizer
        self._undo: list[Callable[[], None]] = []

    def refresh(self) -> None:
        """Cast, gather and transpose from the masters as they are: after they were written by hand. Collective.

        The optimizer does this by itself when it loads a checkpoint or reads its masters from the model. RuntimeError after a step
        that raised half-way: its masters are not worth a cast.
        """
        self._check_attached()
        self._guard.refresh(self._refresh)

    def _refresh(self) -> None:
        for refresh in self._refreshes.values():
            refresh()

    def master_views(self) -> Iterator[MasterViews]:
        """The masters of all parameters, one source an optimizer, for `zerocast.verify`.

        Bytes that no gather has brought since the last cast are gathered first, as the next forward pass would.
        """
        self._check_attached()
        self._guard.check_complete()
        for source in self._sources:
            yield from source.master_views()

    def detach(self) -> None:
        """Give the host its own methods back, but for those that would write over quantized weights: they raise until `attach`.

        The model stays as it is and can be read. Collective where gathers overlap: those of the last step are finished first.
        """
        writes = self._guard.writes
        for source in () if writes.is_partial else self._sources:
            source.gather_due()
        left = [(one, Left(self._scaling.get(id(one)), writes)) for one in self._optimizers]
        self._give_back()
        for one, of_this in left:
            if unattached.owns_quantized_weights(one):
                unattached.refuse(one, of_this)

    def _check_attached(self) -> None:
        if not self._optimizers:
            raise ValueError(
                "this attachment was detached: nothing casts its masters; attach(optimizer, ddp_chunks) again"
            )

    def _give_back(self) -> None:
        """The host is as it was before `attach`."""
        for owner, name in self._replaced:
            del vars(owner)[name]
        for undo in self._undo:
            undo()
        for plan in self.plans:
            plan.freshness.finish = None
        self._replaced, self._refreshes, self._undo, self.plans, self._sources = [], {}, [], [], []
        self._optimizers, self._scaling = [], {}

    def _replace(self, owner: Any, name: str, value: Callable[..., Any]) -> None:
        if name not in vars(owner):
            self._replaced.append((owner, name))
        setattr(owner, name, value)

    def _take_over(self, optimizer: Any, shards: Shards, chunks: Sequence[Any], left: Left | None) -> None:
        """Replace the methods of one optimizer that cast, and those of the bucket groups of its buffers."""
        group = Group.of(optimizer.data_parallel_group)
        theirs = TETensors(zip(shards.names, shards.params, shards.weights, strict=True))
        self._undo.append(theirs.release)
        plan = CastPlan(
            shards.weights, shards.masters, shards.starts, group, names=shards.names, guard=self._guard.writes
        )
        plan.freshness.advice = ADVICE
        if left is None or left.delayed is None:
            plan.delayed.broadcast(group)
        else:
            plan.delayed.load_state_dict(left.delayed.state_dict())
            plan.delayed.unseeded = left.delayed.unseeded
        self._scaling[id(optimizer)] = plan.delayed
        scaling = ScalingState(optimizer, plan.delayed, group)
        self.plans.append(plan)
        parts, masters = [part for part, _ in shards.plain], [master for _, master in shards.plain]
        buckets = {id(bucket) for buffer in optimizer.buffers for bucket in buffer.buckets}
        mine = [
            bucket_group
            for chunk in chunks
            for bucket_group in host.bucket_groups(chunk)
            if any(id(bucket) in buckets for bucket in bucket_group.buckets)
        ]
        source = Source(plan, shards, theirs, mine, self._turns.finish)
        plan.freshness.owner = weakref.ref(source)
        self._sources.append(source)

        @torch.no_grad()
        def copy_masters(repeat: bool = False) -> None:
            source.cast()
            theirs.follow()
            plan.cast(repeat=repeat)
            if parts:
                torch._foreach_copy_(parts, masters)

        def refresh() -> None:
            copy_masters(repeat=True)
            source.gather()

        self._refreshes[id(optimizer)] = refresh
        copy_model = _then(masters_from_model(optimizer, shards, theirs), refresh)
        self._replace(
            optimizer, "_copy_main_params_to_model_params", self._guard.writer(copy_masters, "a cast", masters=False)
        )
        self._replace(
            optimizer,
            "_copy_model_params_to_main_params",
            self._guard.writer(copy_model, "reading masters from the model", masters=True),
        )
        self._replace(optimizer, "sharded_state_dict", scaling.saving(optimizer.sharded_state_dict))
        loading = scaling.loading(optimizer.load_state_dict, self._guard.loads)
        self._replace(optimizer, "load_state_dict", loading)
        group_of: dict[int, Any] = {}
        for bucket_group in mine:
            params = primary_of(bucket_group)
            group_of.update((id(weight_of(param).state), bucket_group) for param in params)
            after_gather = after_gather_of(params, plan.backend, source, bucket_group)
            if any(map(te_tensors.is_te_tensor, params)):  # Megatron asks TransformerEngine for their copies
                self._replace(bucket_group, "_post_param_sync", nothing)
            for name in ("start_param_sync", "finish_param_sync"):
                gather = completing(bucket_group, name, after_gather)
                gather = self._guard.writer(gather, "an all-gather", masters=False)
                self._replace(bucket_group, name, self._turns.alone(gather))
        plan.freshness.finish = lambda weight: self._turns.finish(group_of[id(weight.state)])

    def _stand_guard(self, optimizer: Any, distributed: Sequence[Any], verify_every: int | None) -> None:
        """Around whatever steps, saves and loads, of the optimizer that was given and of those inside it."""
        guard = self._guard
        for one in distributed:
            self._replace(one, "_set_main_param_and_optimizer_states", without_steps(one))
            self._replace(one, "sharded_state_dict", saving_unpadded(one))
        for one in {id(one): one for one in (optimizer, *distributed)}.values():
            of_all = one is optimizer or len(distributed) == 1
            refresh = self._refresh if of_all else self._refreshes.get(id(one), lambda: None)
            step = guard.writer(one.step_with_ready_grads, "an optimizer step", masters=True)
            if one is optimizer and verify_every is not None:
                step = _then(step, self._verify_every(verify_every))
            self._replace(one, "step_with_ready_grads", step)
            for name in ("step", "state_dict", "save_parameter_state"):
                self._replace(one, name, guard.checked(getattr(one, name)))
            self._replace(one, "sharded_state_dict", guard.sharded_state_dict(one.sharded_state_dict, distributed))
            for name in ("load_state_dict", "load_parameter_state"):
                loaded = distributed if of_all else [one]
                self._replace(one, name, guard.loader(getattr(one, name), refresh, loaded, of_all))

    def _verify_every(self, steps: int) -> Callable[[], None]:
        """What to call after each step: VerificationError on every rank of a group, every so many steps, if bytes differ."""
        taken = 0

        def stepped() -> None:
            nonlocal taken
            taken += 1
            if taken % steps == 0:
                verify(self).raise_for_differences()

        return stepped


def attach(optimizer: Any, ddp_chunks: Any, verify_every: int | None = None) -> Attachment:
    """Let zerocast cast and transpose the quantized weights of `ddp_chunks`, whose masters `optimizer` owns.

    `optimizer` is what `get_megatron_optimizer` returned, chained or not; `ddp_chunks` the DistributedDataParallel or the list of
    them. Both were made inside `building()`. Call it on every rank, before the first step and before a checkpoint is loaded.
    `verify_every` compares all live bytes with an unsharded cast of the masters after every so many steps, as `zerocast.verify`
    does, and raises VerificationError on every rank of the data-parallel group if any differ.

    Raises, on every rank of a data-parallel group if on any: ValueError for settings that are not supported, for a byte that a
    rank casts and does not send, for elements that nobody owns; TypeError for quantized weights of another library;
    RuntimeError for a second attachment, an optimizer that has stepped without one, and a host without the names that are
    looked for.
    """
    if verify_every is not None and verify_every < 1:
        raise ValueError(f"verify_every is None or at least 1, got {verify_every}")
    chunks = list(ddp_chunks) if isinstance(ddp_chunks, (list, tuple, nn.ModuleList)) else [ddp_chunks]
    refusal.refuse_layer_wise(optimizer)
    optimizers = host.distributed_optimizers(optimizer)
    for chunk in chunks:
        refusal.refuse_grouped(chunk)
    host.check_optimizer(optimizer, chained=True)
    for one in optimizers:
        refusal.refuse(one)
        host.check_optimizer(one)
    names = {id(param): name for chunk in chunks for name, param in chunk.named_parameters()}
    groups = [group for chunk in chunks for group in host.bucket_groups(chunk)]
    _check_first([optimizer, *optimizers], groups)
    found = [shards_of(one, names) for one in optimizers]
    host.check_groups(group for group in groups if any(map(te_tensors.is_te_tensor, primary_of(group))))
    _check_laid_out(chunks, groups)
    _check_owned(found, groups, names)
    left = [unattached.left_by(one) for one in optimizers]
    for one, shards, before in zip(optimizers, found, left, strict=True):
        _check_together(one, shards, groups, before)
    partial = [before.writes for before in left if before is not None and before.writes.is_partial]
    attachment, restore = Attachment(next(iter(partial), None)), unattached.lift([optimizer, *optimizers])
    try:
        for one, shards, before in zip(optimizers, found, left, strict=True) if any(s.weights for s in found) else ():
            attachment._take_over(one, shards, chunks, before)
        attachment._stand_guard(optimizer, optimizers, verify_every)
        for chunk in chunks:
            attachment._replace(chunk.module, "sharded_state_dict", refusing_quantized(chunk.module.sharded_state_dict))
            attachment._undo += load_plain_values(chunk)
            attachment._undo += te_tensors.check_before_forward(chunk, attachment._guard.check_complete)
    except Exception:
        attachment._give_back()
        restore()
        raise
    attachment._optimizers = list({id(one): one for one in (optimizer, *optimizers)}.values())
    return attachment


def _check_first(optimizers: Sequence[Any], groups: Sequence[Any]) -> None:
    taken = [one for one in optimizers if "step_with_ready_grads" in vars(one) and not unattached.is_refused(one)]
    taken += [group for group in groups if "start_param_sync" in vars(group)]
    if taken:
        raise RuntimeError(f"a {type(taken[0]).__name__} is attached already: detach() first")


def _check_laid_out(chunks: Sequence[Any], groups: Sequence[Any]) -> None:
    """ValueError for a quantized weight that is trained and that no gather brings: it was quantized after DDP was built."""
    gathered = {id(param) for group in groups for bucket in group.buckets for param in bucket.params_list}
    for name, param in (named for chunk in chunks for named in chunk.named_parameters()):
        if is_primary(param) and param.requires_grad and id(param) not in gathered:
            raise ValueError(
                f"{name} is quantized and in no bucket of DistributedDataParallel, which would never train it: call quantize_ "
                "before DistributedDataParallel is built"
            )


def _check_owned(found: Sequence[Shards], groups: Sequence[Any], names: dict[int, str]) -> None:
    owned = {id(param) for shards in found for param in shards.params}
    orphans = [names[id(param)] for group in groups for param in primary_of(group) if id(param) not in owned]
    if orphans:
        raise ValueError(f"no optimizer that was given owns the quantized weights {', '.join(orphans[:4])}")


def _check_together(optimizer: Any, shards: Shards, groups: Sequence[Any], left: Left | None) -> None:
    """What may be wrong on one rank alone is exchanged: all ranks of the group raise, or none does."""
    problem: Exception | None = None
    if left is None and refusal.has_stepped(optimizer):
        problem = RuntimeError("the optimizer has stepped or was loaded already: attach before")
    elif wrong := misplaced(shards, groups):
        problem = ValueError(wrong)
    spans = [shards.span(i) for i in range(len(shards.weights))]
    group = Group.of(optimizer.data_parallel_group)
    by_rank = validate_across_ranks(group, shards.names, problem, [(span.start, span.stop) for span in spans])
    if wrong := uncovered(shards, by_rank):
        raise ValueError(wrong)


def _then(first: Callable[..., Any], second: Callable[[], None]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        second()
        return result

    return both
