"""CastManager: the prepared weights of one model, and when they are cast again.

An optimizer step makes a cast due on every rank; the next gather, which is a collective and so
comes on every rank, casts all weights first, however many optimizers stepped. Any other write to a
master is known only where it happens, and no collective may depend on that. So a rank that was
written to gathers all the same and says so in the header of its bytes (`gather_status.py`). After
the gather every rank knows what all said: if all were written to, all cast and gather once more; if
only some were, all raise.
"""

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zerocast.cast.switch import SwitchPart
from zerocast.distributed.agreement import check_same_call, largest_of_ranks, validate_across_ranks
from zerocast.distributed.group import Caller, Group
from zerocast.formats import FormatSpec
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.amax_layout import ReductionGroup
from zerocast.fsdp2.cast_group import CastGroup
from zerocast.fsdp2.gather_layout import MOST_KEPT
from zerocast.fsdp2.gather_status import StatusExchange
from zerocast.fsdp2.param_groups import ParamGroups, prepared_params
from zerocast.fsdp2.torch_fsdp import MasterAddresses, MasterMemory
from zerocast.fsdp2.weight import ADVICE, CastRecord, FSDPWeight
from zerocast.verification.master_views import MasterView, MasterViews
from zerocast.verification.verify import verify
from zerocast.weight.validity import Use, Validity, debugging

NOT_SHARDED = (
    "call fully_shard on the model that was given to zerocast.fsdp2.prepare, or on modules in it, before the first forward pass "
    "(it takes the place of DistributedDataParallel and FullyShardedDataParallel)"
)

BETWEEN = "call switch after a step, or after zero_grad(), and before the next forward pass"

LOAD = (
    "load a checkpoint (zerocast.optim.load, Checkpoints.load or load_state_dict) through zerocast.fsdp2.TrainingState"
)
_validities: "weakref.WeakKeyDictionary[Any, Validity]" = weakref.WeakKeyDictionary()


def validity_of(owner: nn.Module | Optimizer) -> Validity:
    """The validity of a model's plain parameters, or of an optimizer's state, which a step of
    FusedAdamW or a load writes together with the masters.
    """
    if owner not in _validities:
        _validities[owner] = Validity(LOAD)
    return _validities[owner]


class CastManager:
    """The casts of `model`, whose prepared `weights` are cast together."""

    def __init__(self, model: nn.Module, weight_mesh: DeviceMesh | None, keep_codes: bool | None = None) -> None:
        self._model, self._weight_mesh = weakref.ref(model), weight_mesh
        self.keep_codes = keep_codes  # from one cast to the next; None: by their size
        self._holds_codes = False  # those of this cast, for the rest of a backward pass
        self.weights: list[FSDPWeight] = []
        self.plain: list[str] = []  # the other parameters of two or more dimensions
        self.memory = MasterMemory({})
        self.validity = Validity(LOAD, advice=ADVICE)  # of all masters together
        self.record = CastRecord(self.validity)
        self.param_groups = ParamGroups(self.record.status)
        self.cast_groups: list[CastGroup] = []
        self._reductions: list[tuple[ReductionGroup, list[FSDPWeight]]] = []
        self._caller = Caller("zerocast.fsdp2", "cast")
        self._is_due = True  # a cast, at the next gather
        self._stepped = True  # an optimizer step made it due
        self._steps = 0  # casts after an optimizer step
        # that have stepped over masters: of several none says which weights it has changed
        self._steppers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._verified = 0  # the step after which weights were verified
        # whose steps leave amaxes in the cast groups
        self.measuring: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def __deepcopy__(self, memo: Any) -> "CastManager":
        """Return itself: copies of a shard are states of the same model."""
        return self

    @property
    def model(self) -> nn.Module:
        """The module that was prepared."""
        model = self._model()
        if model is None:
            raise RuntimeError("the module that was given to zerocast.fsdp2.prepare no longer exists")
        return model

    def weight(self, name: str, fmt: FormatSpec) -> FSDPWeight:
        """A new weight of this model; `prepare` chooses which to keep in `weights`."""
        gathered = Validity(LOAD, advice=ADVICE)
        gathered.owner, gathered.has_masters = weakref.ref(self), True
        return FSDPWeight(name, fmt, self.record, gathered)

    @property
    def casts(self) -> tuple[int, bool]:
        """(number of casts so far, True if the next gather makes another)."""
        return self.record.generation, self._is_due

    @property
    def has_company(self) -> bool:
        """True if other ranks have parts of the same masters, or the same parts."""
        return any(reduction.group.size > 1 for reduction, _ in self._reductions)

    def make_due(self, by: Optimizer | None = None) -> None:
        """Cast before the next gather, and let there be one. `by` is who stepped."""
        self._is_due = self._stepped = True
        if by not in self.measuring:
            self._forget_amaxes()
        if by is None:
            self.param_groups.discard()
        else:
            self._steppers.add(by)
            self.param_groups.after_step()

    def before_step_within_backward(self) -> None:
        """Hold the codes of the forward pass, which the rest of its backward pass gathers: an
        optimizer is about to write masters. From the next cast on codes are kept.
        """
        if self._holds_codes or not any(group.gather_casts for group in self.cast_groups):
            return
        self._holds_codes = True
        for group in self.cast_groups:
            group.hold_codes()

    def before_gather(self) -> None:
        """Cast if that is due; RuntimeError before it where headers of the step that ends, read
        now, say that ranks disagree.
        """
        due = self._is_due and not self.param_groups.step_goes_on
        for reduction, _ in self._reductions:
            what = f"{'casts and gathers' if due else 'gathers'} after cast {self.record.generation}"
            check_same_call(reduction.group, what)
        if due:
            self.record.status.next_step()
            self.param_groups.before_cast()
            self.refresh(repeat=not self._stepped)
        elif not self.cast_groups:
            self.bind()

    def cast_again(self) -> None:
        """Cast because all ranks were written to; by a step, perhaps, whose cast this then is. The
        host, which has waited for what ranks say of it, waits for the cast too: this is the stream
        of the products, and FSDP2 reads what later gathers send on another one.
        """
        self.refresh(repeat=not self._stepped)
        for group in self.cast_groups:
            group.synchronize()

    def refresh(self, repeat: bool) -> None:
        """Cast all weights from their masters as they are now, on every rank; with `repeat` not as
        another step.

        A repeated cast uses the delayed scales of the last one and leaves amax histories as they
        are.
        """
        if self._holds_codes:
            self.keep_codes, self._holds_codes, self.cast_groups = True, False, []
        self.bind()
        record = self.record
        record.addresses.check_memory()
        self._caller.number = record.generation + 1
        self.forget_old_amaxes()
        with contextlib.ExitStack() as stack:
            for group in self.cast_groups:
                stack.enter_context(group.delayed.rollback())
            for group in self.cast_groups:
                group.cast(repeat)
                group.stamp(record.generation + 1)
        self.after_cast(repeat)

    def after_cast(self, repeat: bool) -> None:
        """The host's part of a cast after the device's."""
        record = self.record
        record.addresses.note()
        record.generation += 1
        self._steps += not repeat
        written, record.written = record.written, []
        for weight in written:
            weight.mark_cast()
        for weight in self.weights if self._stepped and len(self._steppers) == 1 else written:
            weight.validity.changed()
        self._is_due = self._stepped = False
        self.param_groups.after_cast()
        for weight in self.weights if debugging() else ():
            weight.validity.cast()

    # -- a step that casts at once (`CapturableFusedStep`)

    @property
    def must_seed(self) -> bool:
        """True if the next cast finds first scales of delayed scaling, which takes the host."""
        return any(group.delayed.unseeded for group in self.cast_groups)

    def before_first_step(self) -> None:
        """Before the ordinary step that a graph repeats: leave what casts work in where it is, and
        let only that step's amaxes count, as in the graph.
        """
        self._forget_amaxes()
        for group in self.cast_groups:
            group.hold_scales()

    def cast_first_step(self) -> None:
        """Cast after that step, and keep the tables by which it is cast."""
        for group in self.cast_groups:
            group.hold_tables()
        self.before_gather()

    def before_captured_cast(self, by: Optimizer) -> None:
        """The host's part before a graph of a step and its cast; RuntimeError as at a gather."""
        for reduction, _ in self._reductions:
            check_same_call(reduction.group, f"takes a captured step after cast {self.record.generation}")
        self.make_due(by)
        self.record.status.next_step()
        self._forget_amaxes()  # the graph measures all
        self.record.amaxes_are_old = False
        self._caller.number = self.record.generation + 1

    def launch_cast(self) -> None:
        """The device's part of a cast, whose number it counts by itself."""
        for group in self.cast_groups:
            group.cast(repeat=False)
            group.stamp(None)

    # -- other formats

    def switch_part(self) -> SwitchPart:
        """The part of a prepared model in `zerocast.switch`; the next gather casts."""
        self.bind()
        return SwitchPart(
            groups=[reduction.group for reduction, _ in self._reductions],
            weights={weight.name: (weight.format, weight.shape) for weight in self.weights},
            plain=self.plain,
            check=self._check_switch,
            convert=self._convert,
            recast=lambda formats: None,
            held=[self, self.record, *self.weights, *(weight.param() for weight in self.weights)],
        )

    def _check_switch(self, formats: Mapping[str, FormatSpec]) -> None:
        self.check(Use.SWITCH)
        if self.param_groups.is_in_pass or torch_fsdp.backward_pass() is not None:
            raise RuntimeError(f"a recipe is switched within a forward or backward pass: {BETWEEN}")
        params = [weight.param() for weight in self.weights]
        unused = not self._stepped and any(param.sharded_param.grad is not None for param in params)
        if unused or any(map(torch_fsdp.has_unreduced_gradient, params)):
            raise RuntimeError(
                f"a recipe is switched in the middle of an accumulation, whose backward passes would read two formats: {BETWEEN}"
            )
        for weight in self.weights:
            if weight.name in formats:
                weight.check_format(formats[weight.name], self._weight_mesh)

    def _convert(self, formats: Mapping[str, FormatSpec]) -> None:
        self.param_groups.discard()
        gathered_with = {id(weight.group) for weight in self.weights if weight.name in formats}
        for weight in self.weights:
            if weight.name in formats:
                weight.convert(formats[weight.name])
            elif id(weight.group) in gathered_with:
                weight.forget_gathered()
        self.cast_groups, self._is_due = [], True
        self.bind()

    # -- delayed scaling

    def delayed(self) -> dict[str, dict[str, Tensor]]:
        """The state of delayed scaling by weight, as a step leaves it; casts first if that is
        due.
        """
        self.before_gather()
        self._exchange_finite()
        self.check(Use.SAVE)
        return {name: state for group in self.cast_groups for name, state in group.delayed.state_dict().items()}

    def load_delayed(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from a saved state: the next cast repeats its last one. What it lacks is found
        anew, with a warning.

        Casts nothing: `state` may be what is in use, filled by a reader.
        """
        self.bind()
        for group in self.cast_groups:
            for name in group.delayed.load_state_dict(state):
                warnings.warn(f"no state of delayed scaling for {name}: it starts anew from its amax", stacklevel=3)
        self._is_due, self._stepped = True, False
        self.param_groups.free()

    # -- amaxes that optimizer steps leave

    def forget_old_amaxes(self) -> None:
        """Forget amaxes of masters that something wrote to since: a step is about to leave
        others, or a cast to use them.
        """
        measured = any(group.amaxes.measured for group in self.cast_groups)
        if measured and (self.record.amaxes_are_old or self.record.addresses.any_written()):
            self._forget_amaxes()
        self.record.amaxes_are_old = False

    def after_step(self) -> None:
        """A step has left amaxes: writes that are counted from now on make them old."""
        self.record.addresses.note()

    def _forget_amaxes(self) -> None:
        for group in self.cast_groups:
            group.amaxes.measured = frozenset()

    # -- where masters lie

    def bind(self) -> None:
        """Find the masters where they lie now. The first time all ranks agree on the weights;
        later nothing is sent.
        """
        record = self.record
        if not self._reductions:
            self._reductions = list(self._agree(self._adopt()))
        if not self.cast_groups or self._moved():
            self.cast_groups = []  # whatever raises from here on is begun anew
            for weight in self.weights:
                # buffers to send are new ones: a cast fills them, or the next gather says so
                weight.mark_written()
            for index, weight in enumerate(self.weights):
                weight.locate(index)
            keep = self._keeps_codes()
            for weight in () if keep else self.weights:
                weight.let_go_of_codes()
            record.addresses = MasterAddresses([weight.param for weight in self.weights])
            self.cast_groups = [CastGroup(weights, reduction, keep) for reduction, weights in self._reductions]
        record.rewrapped = False

    def _keeps_codes(self) -> bool:
        if any(weight.must_keep_codes for weight in self.weights):
            return True
        few = sum(weight.layout.codes_nbytes for weight in self.weights) <= MOST_KEPT
        return few if self.keep_codes is None else self.keep_codes

    def _moved(self) -> bool:
        """True if masters lie elsewhere than when they were bound. It takes a new wrapper; debug
        mode looks all the same.
        """
        return (self.record.rewrapped or debugging()) and self.record.addresses.moved()

    def check_sharded(self) -> None:
        """RuntimeError unless FSDP2 manages all weights, as it does from the first forward pass
        on; on the meta device later.
        """
        if not self._reductions and not any(parameter.is_meta for parameter in self.model.parameters()):
            self._adopt()

    def _adopt(self) -> list[FSDPWeight]:
        """The weights once FSDP2 has sharded the model, in the order of its groups; RuntimeError
        if it does not manage all.
        """
        by_group = self.param_groups.find(self.model, set(self.weights))
        found = [weight for _, members in by_group for weight, _ in members]
        missing = sorted({weight.name for weight in self.weights} - {weight.name for weight in found})
        if missing:
            raise RuntimeError(
                f"{missing[0]} is prepared, and no FSDP module inside the prepared model manages it: {NOT_SHARDED}"
            )
        for group, members in by_group:
            for weight, param in members:
                weight.adopt(group, param)
        return found

    def _agree(self, weights: Sequence[FSDPWeight]) -> Iterator[tuple[ReductionGroup, list[FSDPWeight]]]:
        """Who reduces amaxes with whom, once FSDP2 has sharded the model. The only communication
        but that of casts.
        """
        by_group: dict[str, list[FSDPWeight]] = {}
        for weight in weights:
            by_group.setdefault(self._mesh_of(weight).get_group().group_name, []).append(weight)
        for members in by_group.values():
            mesh = self._mesh_of(members[0])
            group = Group.of(mesh).called_by(self._caller)
            problems = [problem for problem in (one.problem(self._weight_mesh) for one in members) if problem]
            validate_across_ranks(group, [one.fingerprint for one in members], next(iter(problems), None))
            # ranks that shard one slice have the same first rank
            ranks = dist.get_process_group_ranks(mesh.get_group())
            first = min(dist.get_process_group_ranks(members[0].shard_mesh.get_group()))
            is_first = largest_of_ranks(group, [rank == first for rank in ranks], "the slices of weights")
            slices = [rank for rank, has_slice in zip(ranks, is_first, strict=True) if has_slice]
            yield ReductionGroup(group, mesh.device_type, slices.index(first), len(slices)), members

    def _mesh_of(self, weight: FSDPWeight) -> DeviceMesh:
        return self._weight_mesh if self._weight_mesh is not None else weight.shard_mesh

    # -- weights that a forward pass left gathered

    def note_left_gathered(self) -> None:
        """After a forward pass of the prepared model: remember what it left gathered.

        RuntimeError on all ranks where they disagreed in a pass without gradients, whose results
        somebody is about to use; the host waits for it.
        """
        self.param_groups.note_left_gathered()
        if torch.is_grad_enabled():
            self.record.status.end_pass()
        else:
            self.check(Use.READ)

    def check(self, use: Use) -> None:
        """RuntimeError while masters may not be used so, and on all ranks where they disagreed in
        any gather so far, or were NaN or Inf in a cast that was gathered. Waits for the device.
        """
        self.validity.check(use)
        self.record.status.check()
        self.record.status.check_finite()

    def _exchange_finite(self) -> None:
        """Let all ranks know of masters that are not finite in a cast that no gather has sent."""
        for group, (reduction, weights) in zip(self.cast_groups, self._reductions, strict=True):
            if not all(weight.is_sent for weight in weights):
                names, cast = [weight.name for weight in weights], self.record.generation
                exchange = StatusExchange(names, group.statuses(), cast, reduction.group, reduction.device)
                exchange.check(self.record.status)

    def exchange_status(self) -> None:
        """Before a forward pass of the prepared model: gather anew what was left gathered, if
        masters were written to since.

        All ranks left the same gathered, or nothing. RuntimeError on all of them where only some
        were written to; on a GPU one of the next times.
        """
        self.check_sharded()
        left = self.param_groups.left_gathered()
        if not left:
            return
        if self._moved():
            for weight in self.weights:
                weight.mark_written()
        is_written = False
        for reduction, weights in self._reductions:
            names, statuses = [weight.name for weight in weights], [weight.status for weight in weights]
            exchange = StatusExchange(names, statuses, self.record.generation, reduction.group, reduction.device)
            exchange.check(self.record.status)
            is_written = exchange.any_written() or is_written
            for weight in weights:
                weight.validity.finish = None
        if is_written:
            for group in left:
                group.gather_again()

    # -- verification

    def master_views(self) -> Iterator[MasterViews]:
        """The masters of each group with the weights that a forward pass computes with; what is not
        gathered is, and freed again.

        A gather casts first if that is due, as that of the next forward pass would. Every rank asks
        for them.
        """
        self.check_sharded()
        self.record.status.check()
        for group in torch_fsdp.groups(self.model):
            weights = [weight for weight, _ in prepared_params(group, set(self.weights))]
            if weights:
                with torch_fsdp.gathered(group):
                    shard_group = Group.of(weights[0].shard_mesh)
                    self.record.status.check()
                    yield MasterViews(shard_group, tuple(map(self._owned, weights)), transient=True)

    def _owned(self, weight: FSDPWeight) -> MasterView:
        span = weight.geometry.span_in_weight
        flat = weight.local.plain.view(-1) if span.numel else None
        scale = weight.scaling.cast_scale(weight.name) if weight.scaling else None
        slices = None
        if weight.sliced:
            slices = next(reduction.group for reduction, weights in self._reductions if weight in weights)
        return MasterView(weight.name, weight.live, flat, span, scale, slices)

    def verify_every(self, steps: int) -> None:
        """Cast if that is due, and verify after every so many optimizer steps.

        VerificationError on every rank of a shard group if any of its bytes differ.
        """
        self.before_gather()
        if self._steps >= self._verified + steps:
            self._verified = self._steps
            verify(self).raise_for_differences()
