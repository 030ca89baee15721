"""StepHooks: the optimizers after whose steps a plan casts, and the plan's claim on its weights.

An optimizer that updates none of a plan's masters would silently leave its weights as they are. So
`attach` raises, and the first step, and one with other parameters than the step before, logs the
masters that no attached optimizer updates.
"""

import logging
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zerocast.cast.partition import Partition
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.group import Group
from zerocast.formats.layout import Span
from zerocast.weight import QuantizedWeight
from zerocast.weight.owners import Claim, check_unclaimed
from zerocast.weight.state import WeightState

logger = logging.getLogger(__name__)


class StepHooks:
    """The hooks of one plan on optimizers.

    Args:
        partition: the partition of the plan. A switch of formats replaces it.
        indices: of the weights that the plan casts.
        group: the ranks of the plan.
        owner: the claim of the plan's owner; None while the plan has none.
    """

    def __init__(self, partition: Partition, indices: Sequence[int], group: Group, owner: Claim | None) -> None:
        self.partition = partition
        self._indices = indices
        self._group = group
        self._owner = owner
        self._hooks: weakref.WeakSet[_CastAfterStep] = weakref.WeakSet()

    def attach(self, optimizer: torch.optim.Optimizer, cast: Callable[[Collection[int]], None]) -> RemovableHandle:
        """Call `cast` with the indices of the weights that it may have changed after every step of
        the optimizer. Collective.

        Raises ValueError on every rank for an optimizer that updates none of the masters or that
        has this hook, and for weights that another owner writes.
        """
        problem: ValueError | None = None
        try:
            self._check_steps(optimizer)
            self.check_unclaimed()
        except ValueError as error:
            # The other ranks must raise it too.
            problem = error
        validate_across_ranks(self._group, [], problem, "attaches a CastPlan to an optimizer")
        stepped = _stepped(optimizer)
        by_rank = self._group.all_gather_object(self.stepped_here(stepped), "the weights that an optimizer updates")
        claim = self.claim(f"a CastPlan that is attached to {type(optimizer).__name__}")
        hook = _CastAfterStep(self, cast, claim, stepped, {index for of_rank in by_rank for index in of_rank})
        self._hooks.add(hook)
        handle: RemovableHandle = optimizer.register_step_post_hook(hook)
        return handle

    @property
    def has_one_optimizer(self) -> bool:
        """True if the plan is attached to a single optimizer, which then updates all masters."""
        return len(self._hooks) == 1

    def claim(self, who: str) -> Claim:
        """Claim the weights for an owner. Raises ValueError, on this rank only, while another owner
        writes any of these elements.
        """
        self.check_unclaimed()
        return Claim(who, self._elements(), by=self)

    def check_unclaimed(self) -> None:
        """Raise ValueError, on this rank only, while another owner writes any of these elements."""
        check_unclaimed(self._elements(), self.is_overridable)

    def is_overridable(self, claim: Claim) -> bool:
        """Return True for a claim of the plan itself or of its owner."""
        return claim is self._owner or claim.is_by(self)

    def report_masters_without_step(self) -> None:
        """Log the masters that no attached optimizer updates."""
        idle = self._without_step({storage for hook in self._hooks for storage in hook.stepped})
        if idle:
            logger.warning("no attached optimizer updates the masters of weights %s: they stay as they are", idle)

    def _elements(self) -> list[tuple[WeightState, list[Span]]]:
        """Return the elements of each weight that casts of this plan write on any rank."""
        shards, ownership = self.partition.shards, self.partition.ownership
        return [(shards[i].weight.state, ownership.spans(i)) for i in self._indices]

    def _check_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError for an optimizer that has this hook, or updates none of the masters."""
        for hook in optimizer._optimizer_step_post_hooks.values():
            if isinstance(hook, _CastAfterStep) and hook.hooks is self:
                raise ValueError(f"this CastPlan is attached to this {type(optimizer).__name__} already")
        stepped = _stepped(optimizer)
        masters = [shard.master for shard in self.partition.shards if shard.master is not None]
        if masters and len(self._without_step(stepped)) == len(masters):
            raise ValueError(
                f"this CastPlan casts {len(masters)} masters and this {type(optimizer).__name__} updates {len(stepped)} "
                "other storages, none of which holds any of them: attach the optimizer of the tensors that were passed as "
                "master_weights"
            )

    def stepped_here(self, stepped: set[int | None]) -> list[int]:
        """Return the indices of weights with a master on this rank that is in one of these
        storages.
        """
        idle = self._without_step(stepped)
        return [i for i in self._indices if self.partition.shards[i].master is not None and i not in idle]

    def without_master(self) -> list[int]:
        """Return the indices of weights whose masters are on other ranks only."""
        return [index for index in self._indices if not self.partition.shards[index].span.numel]

    def _without_step(self, stepped: set[int | None]) -> list[int]:
        """Return the indices of weights whose masters are in none of these storages."""
        if None in stepped:
            return []
        masters = [(index, shard.master) for index, shard in enumerate(self.partition.shards)]
        return [index for index, master in masters if master is not None and not _storages_of([master]) & stepped]


class _CastAfterStep:
    """The hook of one optimizer. It refers to the plan, by `cast`, and to the claim, so both live
    as long as the optimizer has the hook.

    Attributes:
        stepped: the storages that the optimizer may write on this rank.
        changed: the indices of the weights that its steps change, by a master on any rank.
    """

    def __init__(
        self,
        hooks: StepHooks,
        cast: Callable[[Collection[int]], None],
        claim: Claim,
        stepped: set[int | None],
        changed: set[int],
    ) -> None:
        self.hooks = hooks
        self.cast = cast
        self.claim = claim
        self.stepped = stepped
        self.changed = changed
        # The parameters of the optimizer at its last step. Others may take their place.
        self._parameters: list[Tensor] = []

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        before, self._parameters = self._parameters, [p for group in optimizer.param_groups for p in group["params"]]
        if len(before) != len(self._parameters) or not all(map(operator.is_, before, self._parameters)):
            self.stepped = _stepped(optimizer)
            self.changed.update(self.hooks.stepped_here(self.stepped))
            if before:
                # Other ranks do not tell which masters they have exchanged.
                self.changed.update(self.hooks.without_master())
            self.hooks.report_masters_without_step()
        self.cast(self.changed)


def _stepped(optimizer: torch.optim.Optimizer) -> set[int | None]:
    """Return the storages that an optimizer may write: of its parameters, and of its state, which
    has the masters of parameters in low precision.
    """
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    of_state = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return _storages_of([*of_state, *(tensor for group in optimizer.param_groups for tensor in group["params"])])


def _storages_of(tensors: Iterable[Tensor]) -> set[int | None]:
    """Return the addresses of the storages of these tensors, without those that have no elements
    here.

    A DTensor is represented by the storage of its local tensor, a QuantizedWeight by the storage of
    its codes. None represents the storage of a tensor on the meta device, and of other subclasses
    without memory.
    """
    storages: set[int | None] = set()
    for tensor in tensors:
        local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if not local.numel():
            continue
        if isinstance(local, QuantizedWeight):
            local = local.state.rowwise_data
        try:
            storages.add(local.untyped_storage().data_ptr() or None)
        except (NotImplementedError, RuntimeError):
            storages.add(None)
    return storages
