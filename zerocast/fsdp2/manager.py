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
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zerocast.cast.delayed_scaling import DelayedScaling
from zerocast.cast.switch import SwitchPart
from zerocast.distributed.agreement import check_same_call, largest_of_ranks, validate_across_ranks
from zerocast.distributed.group import Caller, Group
from zerocast.distributed.rank_report import ShardStatus
from zerocast.formats import FormatSpec
from zerocast.formats.shared_amax import SharedAmax
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.amax_layout import ReductionGroup
from zerocast.fsdp2.cast_group import CastGroup
from zerocast.fsdp2.gather_status import GatherStatus, StatusExchange
from zerocast.fsdp2.torch_fsdp import MasterAddresses, MasterMemory
from zerocast.fsdp2.weight import ADVICE, LOAD, NOT_SHARDED, FSDPWeight, ParamGroup, Presentation, living
from zerocast.fsdp2.wire import MOST_KEPT, weight_layout
from zerocast.verification.master_views import MasterView, MasterViews
from zerocast.verification.verify import verify
from zerocast.weight.validity import Use, Validity, debugging

BETWEEN = "call switch after a step, or after zero_grad(), and before the next forward pass"

_validities: "weakref.WeakKeyDictionary[Any, Validity]" = weakref.WeakKeyDictionary()


def validity_of(owner: nn.Module | Optimizer) -> Validity:
    """The validity of a model's plain parameters, or of an optimizer's state, which a step of
    FusedAdamW or a load writes together with the masters.
    """
    if owner not in _validities:
        _validities[owner] = Validity(LOAD)
    return _validities[owner]


class CastManager:
    """The casts of `model`, whose prepared `weights` are cast together.

    Args:
        model: not kept alive.
        weight_mesh: the ranks that reduce the amaxes of a weight; by default those that FSDP2
            shards it over.
        keep_codes: True if codes are kept from one cast to the next; None decides by their size.
        plain: the names of its other parameters of two or more dimensions.
        sizes: the elements of each prepared weight by name.

    Attributes:
        generation: how many casts there were. The same on all ranks, or gathers raise.
        validity: of all masters together. It knows of steps and loads that raised half-way.
        status: what ranks said of themselves in the headers of gathers.
        memory: where the shards of masters lie that FSDP2 allocates.
        addresses: where the masters are since the last `bind`, and their version counters at the
            last cast.
        cast_groups: what casts. Empty before the first `bind` and once formats change.
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
        self._model = weakref.ref(model)
        self._weight_mesh = weight_mesh
        self.keep_codes = keep_codes
        self._plain = plain
        self.memory = MasterMemory(sizes or {})
        self._weights: list[weakref.ref[FSDPWeight]] = []
        self.validity = Validity(LOAD, advice=ADVICE)
        self.status = GatherStatus(self.validity)
        self.param_groups = ParamGroups()
        # Who reduces the amaxes of which parameter groups, once FSDP2 has sharded the model.
        self._reductions: list[tuple[ReductionGroup, list[ParamGroup]]] = []
        self._caller = Caller("zerocast.fsdp2", "cast")
        self.addresses = MasterAddresses({})
        self.cast_groups: list[CastGroup] = []
        # The delayed scaling of each weight that has it, in its last cast group.
        self._scaling: dict[str, DelayedScaling] = {}

        self.generation = 0
        self._steps = 0  # casts after an optimizer step
        self._verified = 0  # the step after which weights were verified
        # True if the next gather casts, and if an optimizer step is the reason.
        self._is_due = True
        self._stepped = True
        # The optimizers that have stepped over masters. Of several none says which weights it has
        # changed.
        self._steppers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.measuring: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # Since the last cast: the weights whose masters are known to have changed, whether masters
        # may lie elsewhere than they were located, and whether an operator has written to one since
        # a step left amaxes.
        self._written: list[weakref.ref[FSDPWeight]] = []
        self._is_rewrapped = False
        self._may_have_moved = False  # the same, since the last gather too
        self._amaxes_are_old = False
        # True if the codes of the last cast are held for the rest of a backward pass.
        self._holds_codes = False

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

    def add_weight(
        self, name: str, fmt: FormatSpec, shared_amax: SharedAmax | None, presentation: Presentation
    ) -> FSDPWeight:
        """Return a new weight of this model."""
        weight = FSDPWeight(name, fmt, self, shared_amax, presentation)
        self._weights.append(weakref.ref(weight))
        return weight

    @property
    def weights(self) -> list[FSDPWeight]:
        """The prepared weights, which the model keeps alive."""
        return living(self._weights)

    @property
    def casts(self) -> tuple[int, bool]:
        """(number of casts so far, True if the next gather makes another)."""
        return self.generation, self._is_due

    @property
    def has_company(self) -> bool:
        """True if other ranks have parts of the same masters, or the same parts."""
        return any(reduction.group.size > 1 for reduction, _ in self._reductions)

    # -- told by masters

    def note_operator(self) -> None:
        """An operator has written to a master: amaxes that a step has left are old."""
        self._amaxes_are_old = True

    def note_written(self, weight: FSDPWeight) -> None:
        """A master has changed since the last cast, as this rank knows from now on."""
        self._written.append(weakref.ref(weight))

    def note_rewrapped(self) -> None:
        """A master has another wrapper, and may lie elsewhere than where it was located."""
        self._is_rewrapped = True
        self._may_have_moved = True

    # -- casts

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
        if self._holds_codes or all(group.keep_codes for group in self.cast_groups):
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
            what = f"{'casts and gathers' if due else 'gathers'} after cast {self.generation}"
            check_same_call(reduction.group, what)
        if due:
            self.status.next_step()
            self.refresh(repeat=not self._stepped)
        elif not self.cast_groups:
            self.bind()
        elif self._may_have_moved:
            self._mark_moved()

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
            self.keep_codes = True
            self._holds_codes = False
            self.cast_groups = []
        self.bind()
        self.addresses.check_memory()
        self._caller.number = self.generation + 1
        self.forget_old_amaxes()
        with contextlib.ExitStack() as stack:
            for group in self.cast_groups:
                stack.enter_context(group.delayed.rollback())
            for group in self.cast_groups:
                group.cast(repeat)
                group.stamp(self.generation + 1)
        self.after_cast(repeat)

    def after_cast(self, repeat: bool) -> None:
        """The host's part of a cast after the device's."""
        self.addresses.note()
        self.generation += 1
        self._steps += not repeat
        written = living(self._written)
        self._written = []
        for weight in written:
            weight.mark_cast()
        one_has_stepped = self._stepped and len(self._steppers) == 1
        for weight in self.weights if one_has_stepped else written:
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
            check_same_call(reduction.group, f"takes a captured step after cast {self.generation}")
        self.make_due(by)
        self.status.next_step()
        self._forget_amaxes()  # the graph measures all
        self._amaxes_are_old = False
        self._caller.number = self.generation + 1

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
            plain=self._plain,
            check=self._check_switch,
            convert=self._convert,
            recast=lambda formats: None,
            held=[
                self,
                *self.weights,
                *self.param_groups.prepared,
                *(weight.param() for weight in self.weights),
            ],
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
        self._scaling = {name: scaling for name, scaling in self._scaling.items() if name not in formats}
        for group in self.param_groups.prepared:
            if formats.keys() & set(group.names):
                group.convert(formats)
        self.cast_groups = []
        self._is_due = True
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
        self._is_due = True
        self._stepped = False
        self.param_groups.free()

    def cast_scale(self, name: str) -> Tensor | None:
        """The scale, f32[1], that a weight was cast with last; None without delayed scaling."""
        scaling = self._scaling.get(name)
        return scaling.cast_scale(name) if scaling else None

    # -- amaxes that optimizer steps leave

    def forget_old_amaxes(self) -> None:
        """Forget amaxes of masters that something wrote to since: a step is about to leave
        others, or a cast to use them.
        """
        measured = any(group.amaxes.measured for group in self.cast_groups)
        if measured and (self._amaxes_are_old or self.addresses.any_written()):
            self._forget_amaxes()
        self._amaxes_are_old = False

    def after_step(self) -> None:
        """A step has left amaxes: writes that are counted from now on make them old."""
        self.addresses.note()

    def _forget_amaxes(self) -> None:
        for group in self.cast_groups:
            group.amaxes.measured = frozenset()

    # -- where masters lie

    def bind(self) -> None:
        """Find the masters where they lie now. The first time all ranks agree on the weights;
        later nothing is sent.
        """
        if not self._reductions:
            self._adopt()
            self._reductions = list(self._agree())
        if not self.cast_groups or self._moved():
            self.cast_groups = []  # whatever raises from here on is begun anew
            for weight in self.weights:
                # buffers to send are new ones: a cast fills them, or the next gather says so
                weight.mark_written()
            for weight in self.weights:
                weight.locate()
            self.addresses = MasterAddresses({weight.name: weight.param for weight in self.weights})
            keep, scaling = self._keeps_codes(), self._seeded_scaling()
            self.cast_groups = [CastGroup(groups, reduction, keep, scaling) for reduction, groups in self._reductions]
            self._scaling = {name: group.delayed for group in self.cast_groups for name in group.delayed.state_dict()}
        self._is_rewrapped = False
        self._may_have_moved = False

    def _seeded_scaling(self) -> dict[str, dict[str, Tensor]]:
        """The state of delayed scaling by weight in the cast groups of before."""
        found: dict[str, dict[str, Tensor]] = {}
        for scaling in {id(scaling): scaling for scaling in self._scaling.values()}.values():
            found |= scaling.state_dict()
        return {name: found[name] for name, scaling in self._scaling.items() if name not in scaling.unseeded}

    def _keeps_codes(self) -> bool:
        if any(weight.must_keep_codes for weight in self.weights):
            return True
        if self.keep_codes is not None:
            return self.keep_codes
        return sum(weight_layout(weight.geometry).codes_nbytes for weight in self.weights) <= MOST_KEPT

    def _moved(self) -> bool:
        """True if masters lie elsewhere than when they were bound. It takes a new wrapper; debug
        mode looks all the same.
        """
        return (self._is_rewrapped or debugging()) and self.addresses.moved()

    def _mark_moved(self) -> None:
        """Let headers say which masters lie elsewhere than at the last cast: other tensors have
        taken their places.
        """
        self._may_have_moved = False
        moved = self.addresses.moved_names()
        for weight in self.weights if moved else ():
            if weight.name in moved:
                weight.mark_written()

    def check_sharded(self) -> None:
        """RuntimeError unless FSDP2 manages all weights, as it does from the first forward pass
        on; on the meta device later.
        """
        if not self._reductions and not any(parameter.is_meta for parameter in self.model.parameters()):
            self._adopt()

    def _adopt(self) -> None:
        """Find the weights in the groups of FSDP2, once it has sharded the model; RuntimeError if
        it does not manage all.
        """
        self.param_groups.find(self.model, set(self.weights), self.status)
        found = {name for group in self.param_groups.prepared for name in group.names}
        missing = sorted(weight.name for weight in self.weights if weight.name not in found)
        if missing:
            raise RuntimeError(
                f"{missing[0]} is prepared, and no FSDP module inside the prepared model manages it: {NOT_SHARDED}"
            )

    def _agree(self) -> Iterator[tuple[ReductionGroup, list[ParamGroup]]]:
        """Who reduces amaxes with whom, once FSDP2 has sharded the model. The only communication
        but that of casts.
        """
        by_mesh: dict[str, list[ParamGroup]] = {}
        for group in self.param_groups.prepared:
            by_mesh.setdefault(self._mesh_of(group.weights[0]).get_group().group_name, []).append(group)
        for groups in by_mesh.values():
            members = [weight for group in groups for weight in group.weights]
            mesh = self._mesh_of(members[0])
            ranks_of_mesh = Group.of(mesh).called_by(self._caller)
            problems = [problem for problem in (one.problem(self._weight_mesh) for one in members) if problem]
            validate_across_ranks(ranks_of_mesh, [one.fingerprint for one in members], next(iter(problems), None))
            # ranks that shard one slice have the same first rank
            ranks = dist.get_process_group_ranks(mesh.get_group())
            first = min(dist.get_process_group_ranks(members[0].shard_mesh.get_group()))
            is_first = largest_of_ranks(ranks_of_mesh, [rank == first for rank in ranks], "the slices of weights")
            slices = [rank for rank, has_slice in zip(ranks, is_first, strict=True) if has_slice]
            yield ReductionGroup(ranks_of_mesh, mesh.device_type, slices.index(first), len(slices)), groups

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
            self.status.end_pass()
        else:
            self.check(Use.READ)

    def check(self, use: Use) -> None:
        """RuntimeError while masters may not be used so, and on all ranks where they disagreed in
        any gather so far, or were NaN or Inf in a cast that was gathered. Waits for the device.
        """
        self.validity.check(use)
        self.status.check()
        self.status.check_finite()

    def _exchange_finite(self) -> None:
        """Let all ranks know of masters that are not finite in a cast that no gather has sent."""
        for group, (reduction, _) in zip(self.cast_groups, self._reductions, strict=True):
            if not all(weight.is_sent for weight in group.weights):
                self._exchange(reduction, group.weights, group.statuses())

    def _exchange(
        self, reduction: ReductionGroup, weights: Sequence[FSDPWeight], statuses: Sequence[ShardStatus]
    ) -> StatusExchange:
        """Tell all ranks of the statuses here. RuntimeError on all of them where they disagree; on
        a GPU a step later.
        """
        names = [weight.name for weight in weights]
        exchange = StatusExchange(names, statuses, self.generation, reduction.group, reduction.device)
        exchange.check(self.status)
        return exchange

    def exchange_status(self) -> None:
        """Before a forward pass of the prepared model: gather anew what was left gathered, if
        masters were written to since.

        All ranks left the same gathered, or nothing. RuntimeError on all of them where only some
        were written to; on a GPU one of the next times.
        """
        self.check_sharded()
        self.param_groups.before_forward(self.model)
        left = self.param_groups.left_gathered()
        if not left:
            return
        if self._moved():
            for weight in self.weights:
                weight.mark_written()
        is_written = False
        for reduction, groups in self._reductions:
            weights = [weight for group in groups for weight in group.weights]
            exchange = self._exchange(reduction, weights, [weight.status for weight in weights])
            is_written = exchange.any_written() or is_written
            for weight in weights:
                weight.mark_readable()
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
        self.status.check()
        for group in torch_fsdp.groups(self.model):
            weights = [weight for weight, _ in prepared_params(group, set(self.weights))]
            if weights:
                with torch_fsdp.gathered(group):
                    shard_group = Group.of(weights[0].shard_mesh)
                    self.status.check()
                    yield MasterViews(shard_group, tuple(map(self._owned, weights)), transient=True)

    def _owned(self, weight: FSDPWeight) -> MasterView:
        span = weight.geometry.span_in_weight
        flat = weight.local.plain.view(-1) if span.numel else None
        slices = None
        if weight.sliced:
            slices = next(reduction.group for reduction, groups in self._reductions if weight.group in groups)
        return MasterView(weight.name, weight.live, flat, span, self.cast_scale(weight.name), slices)

    def verify_every(self, steps: int) -> None:
        """Cast if that is due, and verify after every so many optimizer steps.

        VerificationError on every rank of a shard group if any of its bytes differ.
        """
        self.before_gather()
        if self._steps >= self._verified + steps:
            self._verified = self._steps
            verify(self).raise_for_differences()


class ParamGroups:
    """FSDP2's parameter groups in a prepared model, and what optimizer steps do to what they have
    gathered.

    Attributes:
        prepared: those that gather prepared weights, once FSDP2 has sharded the model.
    """

    def __init__(self) -> None:
        self.prepared: list[ParamGroup] = []
        self._groups: list[weakref.ref[Any]] = []
        # What the last forward pass left gathered, and how many weights it had received by then.
        self._left: list[tuple[ParamGroup, int]] = []
        # The backward pass within which an optimizer has stepped, from a gradient's hook, until the
        # next cast.
        self._stepped_in: int | None = None

    def find(self, model: nn.Module, weights: Collection[FSDPWeight], status: GatherStatus) -> None:
        """Find the groups of a sharded model, and which of `weights` each of them gathers."""
        groups = list(torch_fsdp.groups(model))
        self._groups = [weakref.ref(group) for group in groups]
        members = [(group, prepared_params(group, weights)) for group in groups]
        self.prepared = [ParamGroup(group, found, status) for group, found in members if found]

    # -- what is left gathered

    def note_left_gathered(self) -> None:
        """A forward pass ends, and leaves some groups gathered."""
        self._left = [(group, group.received) for group in self.prepared if group.is_unsharded]

    def left_gathered(self) -> list[ParamGroup]:
        """The groups that nothing has gathered since the last forward pass left them so; alike
        on all ranks.
        """
        return [group for group, received in self._left if group.is_unsharded and group.received == received]

    def free(self) -> None:
        """Let the next forward pass gather what is left gathered."""
        torch_fsdp.reshard(group() for group in self._groups)

    def discard(self) -> None:
        """The same, and forget gathers that a pass which broke off has left."""
        torch_fsdp.discard_gathers(group() for group in self._groups)
        self.free()
        self._stepped_in = None

    # -- optimizer steps

    def after_step(self) -> None:
        """Let there be a gather before the next forward pass.

        Optimizers that step within a backward pass, each a few parameters, take one step together:
        what is gathered for the rest of that pass are the weights of its forward pass.
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
        groups = (group() for group in self._groups)
        return any(group is not None and not torch_fsdp.is_idle(group) for group in groups)

    @property
    def step_goes_on(self) -> bool:
        """True while the backward pass runs within which optimizers step."""
        return self._stepped_in is not None and torch_fsdp.backward_pass() is not None

    def before_forward(self, model: nn.Module) -> None:
        """Discard what a backward pass has left gathered, or begun to gather, that raised after an
        optimizer had stepped within it. FSDP2 has gathered the weights of `model` itself by now.
        """
        if self._stepped_in is not None and torch_fsdp.backward_pass() is None:
            own = list(torch_fsdp.groups_at(model))
            below = [group for group in (group() for group in self._groups) if group not in own]
            torch_fsdp.discard_gathers(below)
            torch_fsdp.reshard(below)
            self._stepped_in = None

    def after_cast(self) -> None:
        """A step that follows is another one."""
        self._stepped_in = None

    def _free_idle(self) -> None:
        """At the end of a backward pass, which may be one of recomputed modules within another."""
        torch_fsdp.reshard(group for group in (group() for group in self._groups) if torch_fsdp.is_idle(group))


def prepared_params(group: Any, weights: Collection[FSDPWeight]) -> list[tuple[FSDPWeight, Any]]:
    """(weight, FSDPParam) of the parameters of an FSDPParamGroup whose local tensor is the
    MasterParameter of one of `weights`.
    """
    params: list[tuple[Any, Any]] = [
        (getattr(param._sharded_local_tensor, "weight", None), param) for param in group.fsdp_params
    ]
    return [(weight, param) for weight, param in params if weight in weights]
