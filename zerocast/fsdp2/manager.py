"""CastManager decides when the prepared weights of a model are cast.

An optimizer step makes a cast due on every rank. The next gather is a collective, so every rank
calls it, and it first casts all weights, once, however many optimizers have stepped.

Any other write to a master may be known to one rank only, so no collective may depend on it. That
rank gathers as usual and reports the write in the header of its bytes (`gather_status.py`). After
the gather every rank has the reports of all. If all report a write, all cast and gather again. If
only some do, all raise.
"""

import enum
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zerocast.cast.switch import SwitchPart
from zerocast.formats import FormatSpec
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.master_memory import MasterMemory
from zerocast.fsdp2.plan import ShardPlan
from zerocast.fsdp2.weight import LOAD, FSDPWeight
from zerocast.optim.untrained_checks import COMPARED_AFTER
from zerocast.verification.master_views import MasterViews
from zerocast.verification.verify import verify
from zerocast.weight.validity import Use, Validity, changed_together

FAILED_BACKWARD = (
    "a backward pass of this model raised, and FSDP2 would not reduce all gradients of later passes: call reset_iter_state() of "
    "the root module that fully_shard returned (torch 2.13 and later) and zero_grad() of the optimizer, or load a checkpoint in a "
    "new process. Evaluation is not affected"
)
SWITCH_BETWEEN_STEPS = "call switch after a step, or after zero_grad(), and before the next forward pass"

_validities: "weakref.WeakKeyDictionary[Any, Validity]" = weakref.WeakKeyDictionary()


class DueCast(enum.Enum):
    """Whether the next gather casts first, and with which scales of delayed scaling."""

    NONE = enum.auto()
    # The scales of the last cast.
    REPEAT = enum.auto()
    # The next scales, after an optimizer step, a load of masters or a `refresh`.
    NEXT = enum.auto()


def validity_of(owner: nn.Module | Optimizer) -> Validity:
    """Return the validity of what a step of FusedAdamW or a load writes together with the masters:
    the plain parameters of a model, or the state of an optimizer.
    """
    if owner not in _validities:
        _validities[owner] = Validity(LOAD)
    return _validities[owner]


class CastManager:
    """Casts the prepared weights of `model`, all together.

    Args:
        model, weight_mesh, keep_codes: as in ShardPlan.
        plain: the names of the other parameters of two or more dimensions.
        sizes: the number of elements of each prepared weight, keyed by name.

    Attributes:
        plan: the plan of the casts. Fixed.
        memory: the memory from which FSDP2 allocates the shards of masters. Fixed.
        measuring: the optimizers whose steps leave amaxes in the cast groups (FusedAdamW). They
            add themselves.
    """

    def __init__(
        self,
        model: nn.Module,
        weight_mesh: DeviceMesh | None,
        keep_codes: bool | None = None,
        plain: Sequence[str] = (),
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.plan = ShardPlan(model, weight_mesh, keep_codes)
        self._plain = plain
        self.memory = MasterMemory(sizes or {})
        # The number of casts so far that followed an optimizer step, a load or a `refresh`.
        self._steps = 0
        # The value of `_steps` at the last verification.
        self._verified_step = 0
        # The cast that the next gather makes first.
        self._due = DueCast.NEXT
        # The optimizers that have stepped so far.
        self._stepped_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.measuring: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def __deepcopy__(self, memo: Any) -> "CastManager":
        """Return this object. A copied shard is a state of the same model."""
        return self

    @property
    def weights(self) -> list[FSDPWeight]:
        """The prepared weights, which the model keeps alive."""
        return self.plan.weights

    @property
    def casts(self) -> tuple[int, bool]:
        """(The number of the last cast, True if the next gather casts.) Exports of live weights
        compare this value to detect a cast.
        """
        return self.plan.cast_number, self._due is not DueCast.NONE

    # -- casts

    def make_due(self, by: Optimizer | None = None) -> None:
        """Let the next gather cast, and the next forward pass gather.

        `by` is the optimizer that has stepped. None if masters were loaded or written by hand.
        """
        self._due = DueCast.NEXT
        # A rank without rows of a weight sees no write to it. If its backward passes did not raise
        # like those of the other ranks, it would wait for these.
        if by is None:
            self.plan.stepped.update(self.plan.names.values())
        else:
            stepped = {id(p) for group in by.param_groups for p in group["params"]}
            located = [weight for weight in self.weights if weight.is_located]
            self.plan.stepped |= {weight.name for weight in located if id(weight.param().sharded_param) in stepped}
        if by not in self.measuring:
            self.plan.forget_amaxes()
        if by is None:
            self.plan.param_groups.discard()
        else:
            self._stepped_optimizers.add(by)
            self.plan.param_groups.after_step()

    def check_trained(self, by: Optimizer) -> None:
        """Warn about weights that have a gradient although neither `by`, which is about to step,
        nor an optimizer that has stepped before trains them. Checked before two steps only
        (`COMPARED_AFTER`).
        """
        # The first cast came before any step.
        if self._steps - 1 not in COMPARED_AFTER:
            return
        trained: set[int] = set()
        for optimizer in {by, *self._stepped_optimizers}:
            for group in optimizer.param_groups:
                trained.update(map(id, group["params"]))
        untrained = []
        for weight in self.weights:
            if weight.is_located:
                parameter = weight.param().sharded_param
                has_gradient = parameter.requires_grad and parameter.grad is not None
                if has_gradient and id(parameter) not in trained:
                    untrained.append(weight.name)
        if untrained:
            warnings.warn(
                f"{len(untrained)} prepared weights have gradients, and no optimizer that has stepped trains them, among them "
                f"{untrained[0]}: build the optimizer over the parameters that the model has after fully_shard, or call "
                "requires_grad_(False)",
                stacklevel=2,
            )

    @torch.no_grad()
    def cast(self) -> None:
        """Cast the masters as they are now. Collective.

        Delayed scaling moves on only if an optimizer has stepped; otherwise the cast repeats the
        last scales.
        """
        repeat = self._due is not DueCast.NEXT
        self.plan.ready()
        due, restore = self._due, self.plan.saved()
        try:
            self.plan.run(repeat=repeat)
            self.finish_cast(repeat)
        except BaseException:
            # The next cast makes the same step of delayed scaling.
            self._due = due
            restore()
            raise

    def before_gather(self) -> None:
        """Cast if that is due. Called before each gather.

        Raises RuntimeError if ranks disagree in the headers of the step that has ended. They are
        read before the cast.
        """
        if self._due is not DueCast.NONE and not self.plan.param_groups.is_stepping_in_backward:
            self.plan.status.next_step()
            self.cast()
            return
        self.plan.check_same_call("gathers")
        if not self.plan.cast_groups:
            self.plan.bind()
        elif self.plan.may_have_moved:
            self.plan.mark_moved()

    def cast_again(self) -> None:
        """Cast again, since all ranks of this shard group report writes to their masters.

        The cast runs on the stream of the products, and FSDP2 reads the bytes of later gathers on
        another stream, so the CPU waits for the cast.
        """
        with self.plan.single_replica_cast():
            self.cast()
        self.plan.synchronize()

    def finish_cast(self, repeat: bool) -> None:
        """Mark the weights that the cast may have changed, and the cast as done."""
        if not repeat:
            self._steps += 1
        # A single optimizer is taken to change all weights. With several, only those count that
        # one of them has stepped, or whose masters are known to be written.
        has_one_optimizer = len(self._stepped_optimizers) == 1
        all_changed = self._due is DueCast.NEXT and has_one_optimizer
        changed_weights = self.weights if all_changed else self.plan.changed_weights
        changed_together([weight.validity for weight in changed_weights])
        for weight in changed_weights:
            if weight.sliced:
                # Products of a DTensor are torch's, which compare version counters.
                torch_fsdp.outdate_gathered(weight.param())
        self._due = DueCast.NONE
        self.plan.param_groups.after_cast()

    # -- captured steps, which cast immediately (`CapturableFusedStep`)

    def before_first_step(self) -> None:
        """Called before the ordinary step that a graph is going to repeat. Later casts use the same
        memory. Amaxes that earlier steps measured are dropped, since the graph does not use them.
        """
        self.plan.forget_amaxes()
        for group in self.plan.cast_groups:
            group.hold_scales()

    def cast_first_step(self) -> None:
        """Cast after that ordinary step, and keep the tables of the cast for the graph."""
        for group in self.plan.cast_groups:
            group.hold_tables()
        self.before_gather()

    def before_captured_step(self, by: Optimizer) -> None:
        """Make a cast due, and read the headers of the previous step. Raises RuntimeError as
        `before_gather` does.
        """
        self.make_due(by)
        self.plan.status.next_step()

    def after_captured_cast(self) -> None:
        """Do the CPU's part of a cast that a graph has made together with its step."""
        self.plan.done()
        self.finish_cast(repeat=False)

    # -- a switch of formats

    def switch_part(self) -> SwitchPart:
        """Return what `zerocast.switch` needs to switch this model. The next gather casts."""
        if not self.plan.reductions:
            self.plan.bind()
        groups = self.plan.param_groups.prepared
        return SwitchPart(
            groups=[reduction.group for reduction, _ in self.plan.reductions],
            weights={weight.name: (weight.format, weight.shape) for weight in self.weights},
            plain=self._plain,
            check=self._check_switch,
            convert=self._convert,
            recast=lambda formats: None,
            changed_by_switch=[self, self.plan, *self.weights, *groups, *(weight.param() for weight in self.weights)],
        )

    def _check_switch(self, formats: Mapping[str, FormatSpec]) -> None:
        self.plan.bind()
        self.check(Use.SWITCH)
        if self.plan.param_groups.is_in_pass or torch_fsdp.backward_pass() is not None:
            raise RuntimeError(f"a recipe is switched within a forward or backward pass: {SWITCH_BETWEEN_STEPS}")
        params = [weight.param() for weight in self.weights]
        has_reduced_gradient = any(param.sharded_param.grad is not None for param in params)
        has_unused_gradient = has_reduced_gradient and self._due is not DueCast.NEXT
        if has_unused_gradient or any(map(torch_fsdp.has_unreduced_gradient, params)):
            raise RuntimeError(
                "a recipe is switched in the middle of an accumulation, whose backward passes would read two formats: "
                f"{SWITCH_BETWEEN_STEPS}"
            )
        for weight in self.weights:
            if weight.name in formats:
                weight.check_format(formats[weight.name], self.plan.weight_mesh)

    def _convert(self, formats: Mapping[str, FormatSpec]) -> None:
        self.plan.param_groups.discard()
        for group in self.plan.param_groups.prepared:
            if formats.keys() & set(group.names):
                group.convert(formats)
        if self._due is DueCast.NONE:
            self._due = DueCast.REPEAT
        self.plan.rebuild([*formats])

    # -- delayed scaling

    def delayed(self) -> dict[str, dict[str, Tensor]]:
        """Return the state of delayed scaling, keyed by weight. Casts first if a cast is due.
        Collective.
        """
        self.before_gather()
        # This collective is skipped on all ranks or on none, since all are in the same call.
        if not self.plan.status.ignores_errors:
            self.plan.exchange_finite()
        self.check(Use.SAVE)
        state: dict[str, dict[str, Tensor]] = {}
        for group in self.plan.cast_groups:
            state |= group.delayed.state_dict()
        return state

    def load_delayed(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from a saved state: the next cast uses its last scales. A weight without a saved
        state starts from its amax, with a warning.

        Nothing is cast before, since `state` may be the state in use, which a reader has filled in
        place.
        """
        self.plan.bind()
        for group in self.plan.cast_groups:
            for name in group.delayed.load_state_dict(state):
                warnings.warn(f"no state of delayed scaling for {name}: it starts again from its amax", stacklevel=3)
        self._due = DueCast.REPEAT
        self.plan.param_groups.reshard()

    # -- weights that are left gathered

    def end_pass(self) -> None:
        """Called after a forward pass of the prepared model.

        After a pass without gradients the CPU waits for the headers and raises RuntimeError on all
        ranks if they disagree, since no later step would check them.
        """
        if torch.is_grad_enabled():
            self.plan.status.end_pass()
        else:
            self.check(Use.READ)

    def check(self, use: Use) -> None:
        """Raise RuntimeError if masters may not be used in this way now. Raises on all ranks if
        they disagreed in a gather so far, or if masters were NaN or Inf in a cast that was
        gathered. Waits for the device.
        """
        # Headers are read first. Otherwise a rank that raises for its own masters would keep its
        # unread headers, and would raise alone once its masters are valid again.
        self.plan.status.check()
        self.plan.validity.check(use)
        self.plan.status.check_finite()

    def exchange_status(self) -> None:
        """Called before a forward pass of the prepared model. Groups that are already gathered are
        gathered again if their masters or plain parameters were written since. Collective.

        Raises RuntimeError on all ranks if masters of only some ranks were written; on a GPU, a
        later call raises it. Raises RuntimeError, on this rank only, in a pass with gradients after
        a backward pass that raised here.
        """
        plan = self.plan
        if plan.param_groups.has_failed_backward and torch.is_grad_enabled():
            raise RuntimeError(FAILED_BACKWARD)
        plan.check_sharded()
        param_groups = plan.param_groups
        param_groups.discard_failed_backward(plan.model)
        gathered = param_groups.gathered_groups()
        plain_written = any(map(torch_fsdp.has_plain_writes, gathered))
        any_left_gathered = param_groups.any_left_gathered(gathered, plan.model)
        # Plain parameters have no header, so prepared weights report writes to them.
        if plain_written or (any_left_gathered and plan.has_moved()):
            for weight in self.weights:
                weight.mark_written()
        is_written = False
        if any_left_gathered:
            is_written = plan.exchange_statuses()
            # All ranks now know of the writes.
            for weight in self.weights:
                weight.mark_readable()
        # A gather of other groups may have made another cast of written masters.
        param_groups.gather_again_if_stale(gathered, plan.cast_number, is_written)

    # -- verification

    def master_views(self) -> Iterable[MasterViews]:
        """Return the masters with their weights, for `zerocast.verify`. Collective."""
        return self.plan.master_views()

    def verify_every(self, steps: int) -> None:
        """Cast if a cast is due, and verify once per `steps` optimizer steps.

        Raises VerificationError on every rank of a shard group if any of its bytes differ.
        """
        self.before_gather()
        if self._steps >= self._verified_step + steps:
            self._verified_step = self._steps
            verify(self).raise_for_differences()
