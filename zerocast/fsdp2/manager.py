"""CastManager: when the prepared weights of one model are cast: FSDP2 as a host of a Driver.

An optimizer step makes a cast due on every rank; the next gather, which is a collective and so
comes on every rank, casts all weights first, however many optimizers stepped. Any other write to a
master is known only where it happens, and no collective may depend on that. So a rank that was
written to gathers all the same and says so in the header of its bytes (`gather_status.py`). After
the gather every rank knows what all said: if all were written to, all cast and gather once more; if
only some were, all raise.
"""

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zerocast.cast.host import Driver, GatheredByCaller
from zerocast.cast.switch import SwitchPart
from zerocast.formats import FormatSpec
from zerocast.formats.shared_amax import SharedAmax
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.plan import ShardPlan
from zerocast.fsdp2.torch_fsdp import MasterMemory
from zerocast.fsdp2.weight import LOAD, FSDPWeight, Presentation
from zerocast.verification.verify import verify
from zerocast.weight.validity import Use, Validity

BETWEEN = "call switch after a step, or after zero_grad(), and before the next forward pass"

_validities: "weakref.WeakKeyDictionary[Any, Validity]" = weakref.WeakKeyDictionary()


def validity_of(owner: nn.Module | Optimizer) -> Validity:
    """The validity of a model's plain parameters, or of an optimizer's state, which a step of
    FusedAdamW or a load writes together with the masters.
    """
    if owner not in _validities:
        _validities[owner] = Validity(LOAD)
    return _validities[owner]


class CastManager(Driver[ShardPlan]):
    """The casts of `model`, whose prepared weights are cast together.

    Args:
        model, weight_mesh, keep_codes: as in ShardPlan.
        plain: the names of its other parameters of two or more dimensions.
        sizes: the elements of each prepared weight by name.

    Attributes:
        memory: where the shards of masters lie that FSDP2 allocates.
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
        # FSDP2 gathers, whenever it wants to.
        super().__init__(ShardPlan(model, weight_mesh, keep_codes), GatheredByCaller())
        self._plain = plain
        self.memory = MasterMemory(sizes or {})
        self._steps = 0  # casts after an optimizer step
        self._verified = 0  # the step after which weights were verified
        # True if the next gather casts, and if an optimizer step is the reason.
        self._is_due = True
        self._stepped = True
        # The optimizers that have stepped over masters. Of several none says which weights it has
        # changed.
        self._steppers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.measuring: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def __deepcopy__(self, memo: Any) -> "CastManager":
        """Return itself: copies of a shard are states of the same model."""
        return self

    def add_weight(
        self, name: str, fmt: FormatSpec, shared_amax: SharedAmax | None, presentation: Presentation
    ) -> FSDPWeight:
        """Return a new weight of this model."""
        weight = FSDPWeight(name, fmt, self, shared_amax, presentation)
        self.plan.add(weight)
        return weight

    @property
    def weights(self) -> list[FSDPWeight]:
        """The prepared weights, which the model keeps alive."""
        return self.plan.weights

    @property
    def casts(self) -> tuple[int, bool]:
        """(number of casts so far, True if the next gather makes another)."""
        return self.plan.generation, self._is_due

    # -- casts

    def make_due(self, by: Optimizer | None = None) -> None:
        """Cast before the next gather, and let there be one. `by` is who stepped."""
        self._is_due = self._stepped = True
        if by not in self.measuring:
            self.plan.forget_amaxes()
        if by is None:
            self.plan.param_groups.discard()
        else:
            self._steppers.add(by)
            self.plan.param_groups.after_step()

    def before_gather(self) -> None:
        """Cast if that is due; RuntimeError before it where headers of the step that ends, read
        now, say that ranks disagree.
        """
        if self._is_due and not self.plan.param_groups.step_goes_on:
            self.plan.status.next_step()
            self.cast(repeat=not self._stepped)
            return
        self.plan.check_same_call("gathers")
        if not self.plan.cast_groups:
            self.plan.bind()
        elif self.plan.may_have_moved:
            self.plan.mark_moved()

    def cast_again(self) -> None:
        """Cast because all ranks were written to; by a step, perhaps, whose cast this then is. The
        host, which has waited for what ranks say of it, waits for the cast too: this is the stream
        of the products, and FSDP2 reads what later gathers send on another one.
        """
        self.cast(repeat=not self._stepped)
        self.plan.synchronize()

    def has_cast(self, repeat: bool) -> None:
        """After a cast: the weights that it may have changed have other values, and none is due."""
        self._steps += not repeat
        one_has_stepped = self._stepped and len(self._steppers) == 1
        for weight in self.weights if one_has_stepped else self.plan.changed:
            weight.validity.changed()
        self._is_due = self._stepped = False
        self.plan.param_groups.after_cast()

    # -- a step that casts at once (`CapturableFusedStep`)

    def before_first_step(self) -> None:
        """Before the ordinary step that a graph repeats: leave what casts work in where it is, and
        let only that step's amaxes count, as in the graph.
        """
        self.plan.forget_amaxes()
        for group in self.plan.cast_groups:
            group.hold_scales()

    def cast_first_step(self) -> None:
        """Cast after that step, and keep the tables by which it is cast."""
        for group in self.plan.cast_groups:
            group.hold_tables()
        self.before_gather()

    def before_captured_cast(self, by: Optimizer) -> None:
        """The host's part before a graph of a step and its cast; RuntimeError as at a gather."""
        self.make_due(by)
        self.plan.status.next_step()
        self.ready("takes a captured step")
        self.plan.check_ready()
        self.plan.forget_amaxes()  # the graph measures all

    def after_captured_cast(self) -> None:
        """The host's part after it."""
        self.plan.done()
        self.has_cast(repeat=False)

    # -- other formats

    def switch_part(self) -> SwitchPart:
        """The part of a prepared model in `zerocast.switch`; the next gather casts."""
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
        """The state of delayed scaling by weight, as a step leaves it; casts first if that is
        due.
        """
        self.before_gather()
        self.plan.exchange_finite()
        self.check(Use.SAVE)
        return {name: state for group in self.plan.cast_groups for name, state in group.delayed.state_dict().items()}

    def load_delayed(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from a saved state: the next cast repeats its last one. What it lacks is found
        anew, with a warning.

        Casts nothing: `state` may be what is in use, filled by a reader.
        """
        self.plan.bind()
        for group in self.plan.cast_groups:
            for name in group.delayed.load_state_dict(state):
                warnings.warn(f"no state of delayed scaling for {name}: it starts anew from its amax", stacklevel=3)
        self._is_due = True
        self._stepped = False
        self.plan.param_groups.free()

    # -- weights that a forward pass left gathered

    def note_left_gathered(self) -> None:
        """After a forward pass of the prepared model: remember what it left gathered.

        RuntimeError on all ranks where they disagreed in a pass without gradients, whose results
        somebody is about to use; the host waits for it.
        """
        self.plan.param_groups.note_left_gathered()
        if torch.is_grad_enabled():
            self.plan.status.end_pass()
        else:
            self.check(Use.READ)

    def check(self, use: Use) -> None:
        """RuntimeError while masters may not be used so, and on all ranks where they disagreed in
        any gather so far, or were NaN or Inf in a cast that was gathered. Waits for the device.
        """
        self.plan.validity.check(use)
        self.plan.status.check()
        self.plan.status.check_finite()

    def exchange_status(self) -> None:
        """Before a forward pass of the prepared model: gather anew what was left gathered, if
        masters were written to since.

        All ranks left the same gathered, or nothing. RuntimeError on all of them where only some
        were written to; on a GPU one of the next times.
        """
        plan = self.plan
        plan.check_sharded()
        plan.param_groups.before_forward(plan.model)
        left = plan.param_groups.left_gathered()
        if not left:
            return
        if plan.moved():
            for weight in self.weights:
                weight.mark_written()
        is_written = plan.exchange_statuses()
        for weight in self.weights:
            weight.mark_readable()
        if is_written:
            for group in left:
                group.gather_again()

    # -- verification

    def verify_every(self, steps: int) -> None:
        """Cast if that is due, and verify after every so many optimizer steps.

        VerificationError on every rank of a shard group if any of its bytes differ.
        """
        self.before_gather()
        if self._steps >= self._verified + steps:
            self._verified = self._steps
            verify(self).raise_for_differences()
