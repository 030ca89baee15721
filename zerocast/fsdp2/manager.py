"""CastManager decides when the prepared weights of a model are cast.

An optimizer step makes a cast due on every rank. The next gather is a collective, so it comes on
every rank, and casts all weights first, however many optimizers stepped. Only one rank knows of any
other write to a master, and no collective may depend on that. So this rank gathers as usual, and
reports the write in the header of its bytes (`gather_status.py`). After the gather every rank knows
the reports of all: if all were written to, all cast and gather again. If only some were, all raise.
"""

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

BETWEEN = "call switch after a step, or after zero_grad(), and before the next forward pass"

_validities: "weakref.WeakKeyDictionary[Any, Validity]" = weakref.WeakKeyDictionary()


def validity_of(owner: nn.Module | Optimizer) -> Validity:
    """Return the validity of a model's plain parameters, or of an optimizer's state, which a step
    of FusedAdamW or a load writes together with the masters.
    """
    if owner not in _validities:
        _validities[owner] = Validity(LOAD)
    return _validities[owner]


class CastManager:
    """The casts of `model`, whose prepared weights are cast together.

    Args:
        model, weight_mesh, keep_codes: as in ShardPlan.
        plain: the names of its other parameters of two or more dimensions.
        sizes: the number of elements of each prepared weight, keyed by name.

    Attributes:
        plan: the plan of the casts, for as long as this object lives.
        memory: the memory of the shards of masters that FSDP2 allocates.
        measuring: the optimizers whose steps leave amaxes in the cast groups.
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
        # The number of casts that followed an optimizer step, and that number at the last
        # verification.
        self._steps = 0
        self._verified = 0
        # True if the next gather casts, and True if it casts because of an optimizer step.
        self._is_due = True
        self._stepped = True
        # The optimizers that have updated masters so far. If there are several, a step does not
        # show which weights it has changed.
        self._steppers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.measuring: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def __deepcopy__(self, memo: Any) -> "CastManager":
        """Return itself: copies of a shard are states of the same model."""
        return self

    @property
    def weights(self) -> list[FSDPWeight]:
        """The prepared weights, which the model keeps alive."""
        return self.plan.weights

    @property
    def casts(self) -> tuple[int, bool]:
        """(number of casts so far, True if the next gather casts). Exports of live weights ask for
        it.
        """
        return self.plan.generation, self._is_due

    # -- casts

    def make_due(self, by: Optimizer | None = None) -> None:
        """Cast before the next gather, and let the next forward pass gather.

        `by` is the optimizer that has stepped; None if masters were loaded or written by hand.
        """
        self._is_due = self._stepped = True
        if by not in self.measuring:
            self.plan.forget_amaxes()
        if by is None:
            self.plan.param_groups.discard()
        else:
            self._steppers.add(by)
            self.plan.param_groups.after_step()

    def check_trained(self, by: Optimizer) -> None:
        """Warn, before the second step and before the hundred-and-first, of weights with a gradient
        that no optimizer has that has stepped so far. `by` is about to step.
        """
        # The first cast came before any step.
        if self._steps - 1 not in COMPARED_AFTER:
            return
        optimizers = {by, *self._steppers}
        trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        masters = {weight.name: weight.param().sharded_param for weight in self.weights if weight.is_located}
        untrained = [
            name for name, p in masters.items() if p.requires_grad and p.grad is not None and id(p) not in trained
        ]
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

        Delayed scaling moves on only if an optimizer has stepped.
        """
        repeat = not self._stepped
        self.plan.ready()
        self.plan.run(repeat=repeat)
        self.finish_cast(repeat)

    def before_gather(self) -> None:
        """Cast if that is due. Called before each gather.

        Raises RuntimeError if ranks disagree in the headers of the step that ends, which are read
        before the cast.
        """
        if self._is_due and not self.plan.param_groups.is_stepping_in_backward:
            self.plan.status.next_step()
            self.cast()
            return
        self.plan.check_same_call("gathers")
        if not self.plan.cast_groups:
            self.plan.bind()
        elif self.plan.may_have_moved:
            self.plan.mark_moved()

    def cast_again(self) -> None:
        """Cast because the masters of all ranks were written to, by an optimizer step or by hand.

        The CPU waits for the cast, which runs on the stream of the products, since FSDP2 reads the
        bytes of later gathers on another stream.
        """
        with self.plan.single_replica_cast():
            self.cast()
        self.plan.synchronize()

    def finish_cast(self, repeat: bool) -> None:
        """Mark the weights that a cast may have changed as changed. No cast is due any longer."""
        self._steps += not repeat
        one_has_stepped = self._stepped and len(self._steppers) == 1
        changed_weights = self.weights if one_has_stepped else self.plan.changed_weights
        changed_together([weight.validity for weight in changed_weights])
        self._is_due = self._stepped = False
        self.plan.param_groups.after_cast()

    # -- a step that casts immediately (`CapturableFusedStep`)

    def before_first_step(self) -> None:
        """Prepare the ordinary step that a graph is going to repeat. Later casts use the same
        memory. Amaxes of earlier steps are forgotten, as the graph does not use them.
        """
        self.plan.forget_amaxes()
        for group in self.plan.cast_groups:
            group.hold_scales()

    def cast_first_step(self) -> None:
        """Cast after the step that a graph repeats, and keep the tables of that cast."""
        for group in self.plan.cast_groups:
            group.hold_tables()
        self.before_gather()

    def before_captured_step(self, by: Optimizer) -> None:
        """Read the headers of the step before, and make a cast due. Raises RuntimeError as in
        `before_gather`.
        """
        self.make_due(by)
        self.plan.status.next_step()

    def after_captured_cast(self) -> None:
        """Do the CPU's part after a graph of a step and its cast."""
        self.plan.done()
        self.finish_cast(repeat=False)

    # -- a switch of formats

    def switch_part(self) -> SwitchPart:
        """Return the part of a prepared model in `zerocast.switch`. The next gather casts."""
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
            held=[self, self.plan, *self.weights, *groups, *(weight.param() for weight in self.weights)],
        )

    def _check_switch(self, formats: Mapping[str, FormatSpec]) -> None:
        self.plan.bind()
        self.check(Use.SWITCH)
        if self.plan.param_groups.is_in_pass or torch_fsdp.backward_pass() is not None:
            raise RuntimeError(f"a recipe is switched within a forward or backward pass: {BETWEEN}")
        params = [weight.param() for weight in self.weights]
        unused = not self._stepped and any(param.sharded_param.grad is not None for param in params)
        if unused or any(map(torch_fsdp.has_unreduced_gradient, params)):
            raise RuntimeError(
                f"a recipe is switched in the middle of an accumulation, whose backward passes would read two formats: {BETWEEN}"
            )
        for weight in self.weights:
            if weight.name in formats:
                weight.check_format(formats[weight.name], self.plan.weight_mesh)

    def _convert(self, formats: Mapping[str, FormatSpec]) -> None:
        self.plan.param_groups.discard()
        for group in self.plan.param_groups.prepared:
            if formats.keys() & set(group.names):
                group.convert(formats)
        self._is_due = True
        self.plan.rebuild([*formats])

    # -- delayed scaling

    def delayed(self) -> dict[str, dict[str, Tensor]]:
        """Return the state of delayed scaling by weight, as a step leaves it. Casts first if that
        is due.
        """
        self.before_gather()
        # All ranks are in the same call, so all skip it.
        if not self.plan.status.is_overlooked:
            self.plan.exchange_finite()
        self.check(Use.SAVE)
        return {name: state for group in self.plan.cast_groups for name, state in group.delayed.state_dict().items()}

    def load_delayed(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from a saved state: the next cast uses its last scales. A weight without a saved
        state starts from its amax, with a warning.

        It casts nothing, since `state` may be the state in use, which a reader has filled.
        """
        self.plan.bind()
        for group in self.plan.cast_groups:
            for name in group.delayed.load_state_dict(state):
                warnings.warn(f"no state of delayed scaling for {name}: it starts again from its amax", stacklevel=3)
        self._is_due = True
        self._stepped = False
        self.plan.param_groups.reshard()

    # -- weights that are left gathered

    def end_pass(self) -> None:
        """Called after a forward pass of the prepared model.

        Raises RuntimeError, on all ranks, if they disagreed in a pass without gradients. The CPU
        waits for the device then, since no later step would check the results of such a pass.
        """
        if torch.is_grad_enabled():
            self.plan.status.end_pass()
        else:
            self.check(Use.READ)

    def check(self, use: Use) -> None:
        """Raise RuntimeError if masters may not be used in this way now, and on all ranks if they
        disagreed in any gather so far or if masters were NaN or Inf in a cast that was gathered.
        Waits for the device.
        """
        # Headers are read first. Otherwise a rank that raises for its own masters would keep its
        # unread headers, and raise alone once its masters are right again.
        self.plan.status.check()
        self.plan.validity.check(use)
        self.plan.status.check_finite()

    def exchange_status(self) -> None:
        """Gather the groups again that are gathered already, if masters or their plain parameters
        were written since. Called before a forward pass of the prepared model.

        All ranks have the same groups gathered. Raises RuntimeError on all of them if masters
        of only some were written to; on a GPU a later call raises it.
        """
        plan = self.plan
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
        param_groups.gather_again_if_stale(gathered, plan.generation, is_written)

    # -- verification

    def master_views(self) -> Iterable[MasterViews]:
        """Return the masters with their weights, for `zerocast.verify`. Collective."""
        return self.plan.master_views()

    def verify_every(self, steps: int) -> None:
        """Cast if that is due, and verify after every `steps` optimizer steps.

        Raises VerificationError on every rank of a shard group if any of its bytes differ.
        """
        self.before_gather()
        if self._steps >= self._verified + steps:
            self._verified = self._steps
            verify(self).raise_for_differences()
