"""ShardPlan: the cast of the masters that FSDP2 shards, which a CastManager runs. It knows where
the masters are and which ranks reduce amaxes together, and has a CastGroup for each reduction.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerocast.cast.adam_update import AdamUpdate
from zerocast.cast.delayed_scaling import DelayedScaling
from zerocast.cast.plan import Plan
from zerocast.distributed.agreement import check_same_call, largest_of_ranks, validate_across_ranks
from zerocast.distributed.group import Caller, Group
from zerocast.distributed.rank_report import ShardStatus
from zerocast.distributed.row_shards import MOST_KEPT, InnerShards, RowShards, weight_layout
from zerocast.formats.layout import Span, matrix_shape
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.amax_layout import ReductionGroup
from zerocast.fsdp2.cast_group import CastGroup
from zerocast.fsdp2.gather_status import GatherStatus
from zerocast.fsdp2.master_memory import MasterAddresses
from zerocast.fsdp2.param_groups import ParamGroup, ParamGroups, prepared_params
from zerocast.fsdp2.weight import ADVICE, LOAD, NOT_SHARDED, REPLACED, FSDPWeight, living, shard_statuses
from zerocast.verification.master_views import MasterView, MasterViews
from zerocast.weight.validity import InvalidWeights, Validity, debugging


class ShardPlan(Plan):
    """The cast of all prepared weights of one model.

    Args:
        model: the module that was prepared. It is not kept alive.
        weight_mesh: the ranks that reduce the amaxes of a weight; by default those that FSDP2
            shards it over.
        keep_codes: True if codes are kept from one cast to the next; None decides by their size.

    Attributes:
        names: the first name of each prepared weight, keyed by all of its names.
        generation: the number of casts so far. The same on all ranks, or gathers raise.
            `Validity.casts` of a weight counts its gathers instead.
        validity: the validity of all masters together. It knows of steps and loads that failed
            partway.
        status: the reports of all ranks in the headers of gathers.
        param_groups: FSDP2's parameter groups. Empty until FSDP2 has sharded the model.
        reductions: the ranks that reduce amaxes together, with their parameter groups. Empty until
            the first `bind`, and the same ever after.
        addresses: the addresses of the masters at the last `bind`, and their version counters at
            the last cast.
        cast_groups: a CastGroup for each of `reductions`. Other ones after a `bind` that finds
            masters moved; empty before the first one, and after one that raised.
        may_have_moved: True if the storage of masters may have changed since the last gather.
        casts_apart: the casts that this replica has made alone since the last cast of all replicas.
            None during a cast of this replica only.
    """

    def __init__(self, model: nn.Module, weight_mesh: DeviceMesh | None, keep_codes: bool | None) -> None:
        self._model, self.weight_mesh, self.keep_codes = weakref.ref(model), weight_mesh, keep_codes
        self._weights: list[weakref.ref[FSDPWeight]] = []
        self.names: dict[str, str] = {}
        self.validity = Validity(LOAD, advice=ADVICE)
        self.status = GatherStatus(self.validity)
        self.param_groups = ParamGroups()
        self.reductions: list[tuple[ReductionGroup, list[ParamGroup]]] = []
        self._caller = Caller("zerocast.fsdp2", "cast")
        self.addresses = MasterAddresses({})
        self.cast_groups: list[CastGroup] = []
        # True from the moment that masters are found in different storage until there are cast
        # groups over them.
        self._must_bind = True
        # The delayed scaling of each weight that has it, in its last cast group.
        self._scaling: dict[str, DelayedScaling] = {}
        self.generation = 0
        self.casts_apart: int | None = 0
        # The weights whose masters are known to have changed since the last cast. The last cast
        # moved those before it to `_changed`.
        self._written: list[weakref.ref[FSDPWeight]] = []
        self._changed: list[weakref.ref[FSDPWeight]] = []
        # True if a master has a new wrapper since the last `bind`, and may be in different storage.
        self._is_rewrapped = False
        # True if an operator has written to a master since a step left amaxes.
        self._amaxes_are_old = False
        self.may_have_moved = False
        # True if the codes of the last cast are held for the rest of a backward pass.
        self._holds_codes = False

    @property
    def model(self) -> nn.Module:
        """The module that was prepared."""
        model = self._model()
        if model is None:
            raise RuntimeError("the module that was given to zerocast.fsdp2.prepare no longer exists")
        return model

    @property
    def weights(self) -> list[FSDPWeight]:
        """The prepared weights, which the model keeps alive."""
        return living(self._weights)

    def add(self, weight: FSDPWeight) -> None:
        """Add a weight, before the first cast."""
        self._weights.append(weakref.ref(weight))

    @property
    def has_peers(self) -> bool:
        """True if other ranks have parts of the same masters, or the same parts."""
        return any(reduction.group.size > 1 or reduction.replicas.size > 1 for reduction, _ in self.reductions)

    @property
    def changed_weights(self) -> list[FSDPWeight]:
        """The weights whose masters were known to have changed before the last cast."""
        return living(self._changed)

    # -- events of masters
    #
    # event                            told by                        effect
    # an optimizer steps               CastManager.make_due           the next gather casts
    # the step has measured masters    FusedAdamW                     the next cast uses its amaxes
    # an operator writes a master      FSDPWeight.after_write         amaxes are old, weight written
    # a compiled function writes one   version counters               the same
    # a master gets a new wrapper      MasterParameter                its memory is looked up again
    #
    # A weight that is written says so in the header of the next gather, unless a cast comes first.

    def mark_amaxes_old(self) -> None:
        """Called after an operator has written to a master. Measured amaxes are old then."""
        self._amaxes_are_old = True

    def record_written(self, weight: FSDPWeight) -> None:
        """Called once this rank knows that a master has changed since the last cast."""
        self._written.append(weakref.ref(weight))

    def mark_rewrapped(self) -> None:
        """Called when a master gets a new wrapper, which may be over different storage."""
        self._is_rewrapped = True
        self.may_have_moved = True

    # -- casts

    def check_same_call(self, what: str) -> None:
        """In debug mode, raise on every rank unless all ranks are in this call after this cast."""
        if debugging():
            for reduction, _ in self.reductions:
                check_same_call(reduction.group, f"{what} after cast {self.generation}")

    def _announce(self, detail: str) -> None:
        # Ranks report in the headers of gathers. The next step reads those before it casts.
        self.check_same_call(detail or "casts and gathers")

    def _follow(self) -> None:
        if self._holds_codes:
            self.keep_codes = True
            self._holds_codes = False
            self._must_bind = True
        self.bind()
        self.addresses.check_memory()
        self._caller.number = self.generation + 1
        self.forget_old_amaxes()

    @contextlib.contextmanager
    def _writing(self, masters: bool) -> Iterator[None]:
        # A cast that raises stays due, and every gather casts first, so nothing reads partial bytes
        # and no transaction has to stay open.
        with contextlib.ExitStack() as stack:
            for group in self.cast_groups:
                stack.enter_context(group.delayed.rollback())
            yield

    def launch(
        self,
        *,
        skip: Tensor | None = None,
        update: AdamUpdate | None = None,
        repeat: bool = False,
        in_graph: bool = False,
    ) -> None:
        """Do the device's part of a cast. In a graph (`in_graph`) the device counts the casts."""
        for group in self.cast_groups:
            self._set_replica_flags(group, is_refused=self.validity.partial is not None)
            group.cast(repeat)
            group.stamp(None if in_graph else self.generation + 1)

    def done(self, *, repeat: bool = False) -> None:
        """Do the CPU's part of a cast, after the device's."""
        self.addresses.note()
        self._count_cast()
        if self.status.problem is not None:
            self.status.problem = None
            for group in self.cast_groups:
                group.note_masters(are_there=True)
        self._changed = self._written
        self._written = []
        for weight in self.changed_weights:
            weight.is_written = False
        for weight in self.weights if debugging() else ():
            weight.validity.cast()

    def join_collectives(self, gather: Callable[[], None] | None = None) -> None:
        """Reduce amaxes with the ranks that cast. FSDP2 begins the next gather, whose headers say
        that this rank REFUSED, so that all ranks raise there.
        """
        assert self.problem is not None
        if not self.cast_groups:
            # This rank has nothing to send, since allocating it failed.
            raise self.problem
        self.status.problem = self.problem
        for group in self.cast_groups:
            self._set_replica_flags(group, is_refused=True)
            group.join_collectives()
            group.stamp(self.generation + 1)
        self._count_cast()

    @contextlib.contextmanager
    def single_replica_cast(self) -> Iterator[None]:
        """Cast on this replica only while the context is open. The other replicas detect it in the
        next cast that all ranks make, which compares `casts_apart`.
        """
        before, self.casts_apart = self.casts_apart, None
        try:
            yield
        finally:
            self.casts_apart = (before or 0) + 1

    def _set_replica_flags(self, group: CastGroup, is_refused: bool) -> None:
        group.amaxes.is_refused = is_refused
        group.amaxes.casts_apart = self.casts_apart

    def _count_cast(self) -> None:
        self.generation += 1
        if self.casts_apart is not None:
            self.casts_apart = 0

    # -- amaxes that optimizer steps leave

    def forget_old_amaxes(self) -> None:
        """Forget measured amaxes if masters were written to since. Called before a step measures
        others, and before a cast uses them.
        """
        measured = any(group.amaxes.measured for group in self.cast_groups)
        if measured and (self._amaxes_are_old or self.addresses.any_written()):
            self.forget_amaxes()
        self._amaxes_are_old = False

    def after_step(self) -> None:
        """Called after a step has left amaxes. Later writes make them old."""
        self.addresses.note()

    def forget_amaxes(self) -> None:
        """Measure all masters at the next cast."""
        for group in self.cast_groups:
            group.amaxes.measured = frozenset()

    # -- codes and tables that are held

    def hold_codes(self) -> None:
        """Hold the codes of the last cast for the rest of a backward pass, and keep codes from the
        next cast on.
        """
        if self._holds_codes or all(group.keep_codes for group in self.cast_groups):
            return
        self._holds_codes = True
        for group in self.cast_groups:
            group.hold_codes()

    def synchronize(self) -> None:
        """Wait for the last cast."""
        for group in self.cast_groups:
            group.synchronize()

    @property
    def must_seed(self) -> bool:
        """True if the next cast finds the first scales of delayed scaling, which needs the CPU."""
        return any(group.delayed.unseeded for group in self.cast_groups)

    # -- where masters are

    def bind(self) -> None:
        """Find the masters where they are now. The first call is collective: all ranks agree on the
        weights. Later calls are local.

        Raises RuntimeError or TypeError, on this rank only, for masters that cannot be cast.
        """
        if not self.reductions:
            self._adopt()
            self.reductions = list(self._agree())
            # Each weight watches its own masters.
            self.validity.watch([], sharded=self.has_peers)
        if self._must_bind or self.has_moved():
            self._must_bind = True
            for weight in self.weights:
                # Their buffers will be new. The next gather reports this unless a cast fills them.
                weight.mark_written()
            for weight in self.weights:
                weight.locate()
            self.addresses = MasterAddresses({weight.name: weight.param for weight in self.weights})
            keep = self.keep_codes
            if keep is None:
                keep = sum(weight_layout(weight.geometry).codes_nbytes for weight in self.weights) <= MOST_KEPT
            keep = keep or any(weight.must_keep_codes for weight in self.weights)
            scaling = self._seeded_scaling()
            # The memory of the old groups is free before the new ones take theirs.
            self.cast_groups = []
            self.cast_groups = [CastGroup(groups, reduction, keep, scaling) for reduction, groups in self.reductions]
            # After that, so that a rank on which this raises takes part in the casts of the others.
            for group in self.cast_groups:
                group.build_tables()
            self._scaling = {name: group.delayed for group in self.cast_groups for name in group.delayed.state_dict()}
            self._must_bind = False
        self._is_rewrapped = False
        self.may_have_moved = False

    def rebuild(self, changed: Sequence[str]) -> None:
        """Prepare casts after the weights `changed` were given new formats. Local."""
        self._scaling = {name: scaling for name, scaling in self._scaling.items() if name not in changed}
        self.cast_groups = []
        self._must_bind = True
        self.bind()

    def cast_scale(self, name: str) -> Tensor | None:
        """Return the scale, f32[1], of the last cast of a weight; None without delayed scaling."""
        scaling = self._scaling.get(name)
        return scaling.cast_scale(name) if scaling else None

    def _seeded_scaling(self) -> dict[str, dict[str, Tensor]]:
        """Return the state of delayed scaling, keyed by weight, from which the next cast groups
        continue. Weights whose scale no cast has found yet are left out.
        """
        states: dict[str, dict[str, Tensor]] = {}
        for scaling in {id(scaling): scaling for scaling in self._scaling.values()}.values():
            states |= scaling.state_dict()
        return {name: states[name] for name, scaling in self._scaling.items() if name not in scaling.unseeded}

    def has_moved(self) -> bool:
        """Return True if the storage of masters has changed since the last `bind`. A master that
        moves gets a new wrapper, so addresses are compared only after one; in debug mode always.
        """
        return (self._is_rewrapped or debugging()) and self.addresses.has_moved()

    def mark_moved(self) -> None:
        """Report masters that other tensors have replaced since the last cast in the headers of
        the next gather.
        """
        self.may_have_moved = False
        moved = self.addresses.moved_names()
        for weight in self.weights if moved else ():
            if weight.name in moved:
                weight.mark_written()

    def check_sharded(self) -> None:
        """Raise RuntimeError unless FSDP2 manages all weights, as it does from the first forward
        pass on. Does nothing while any parameter is on the meta device.
        """
        if not self.reductions and not any(parameter.is_meta for parameter in self.model.parameters()):
            self._adopt()

    def _adopt(self) -> None:
        """Find the weights in the groups of FSDP2, once it has sharded the model. Raises
        RuntimeError if it does not manage all of them.
        """
        self.param_groups.find(self.model, set(self.weights), self.status)
        managed = {name for group in self.param_groups.prepared for name in group.names}
        # Names that are no longer there, in a wrapper or of a removed module, say nothing.
        named = self.model.named_parameters(remove_duplicate=False)
        present = {name: getattr(getattr(p, "_local_tensor", p), "weight", None) for name, p in named}
        for name, first in self.names.items():
            weight = present.get(name)
            if name in present and (weight is None or (first not in managed and weight.name != first)):
                raise RuntimeError(f"{name} is prepared, and another parameter is in its place now: {REPLACED}")
        missing = sorted(weight.name for weight in self.weights if weight.name not in managed)
        if missing:
            raise RuntimeError(
                f"{missing[0]} is prepared, and no FSDP module inside the prepared model manages it: {NOT_SHARDED}"
            )

    def _agree(self) -> Iterator[tuple[ReductionGroup, list[ParamGroup]]]:
        """Find which ranks reduce amaxes together, once FSDP2 has sharded the model. Collective.

        Raises ValueError or TypeError, on every rank, for weights that any rank cannot cast.
        """
        by_mesh: dict[tuple[str, Group], list[ParamGroup]] = {}
        for group in self.param_groups.prepared:
            name = self._mesh_of(group.weights[0]).get_group().group_name
            by_mesh.setdefault((name, group.replicas), []).append(group)
        for (_, replicas), groups in by_mesh.items():
            members = [weight for group in groups for weight in group.weights]
            mesh = self._mesh_of(members[0])
            ranks_of_mesh = Group.of(mesh).called_by(self._caller)
            problems = (weight.problem(self.weight_mesh) for weight in members)
            problem = next((problem for problem in problems if problem), None)
            validate_across_ranks(ranks_of_mesh, [weight.fingerprint for weight in members], problem)
            # Ranks that shard one slice have the same first rank.
            ranks = dist.get_process_group_ranks(mesh.get_group())
            first = min(dist.get_process_group_ranks(members[0].shard_mesh.get_group()))
            is_first = largest_of_ranks(ranks_of_mesh, [rank == first for rank in ranks], "the slices of weights")
            slices = [rank for rank, has_slice in zip(ranks, is_first, strict=True) if has_slice]
            replicas = replicas.called_by(self._caller)
            yield ReductionGroup(ranks_of_mesh, mesh.device_type, slices.index(first), len(slices), replicas), groups

    def _mesh_of(self, weight: FSDPWeight) -> DeviceMesh:
        return self.weight_mesh if self.weight_mesh is not None else weight.shard_mesh

    # -- exchanges between ranks without a gather

    def exchange_finite(self) -> None:
        """Report masters that are partial, and those that are not finite in a cast that no gather
        has sent to all ranks. Raises RuntimeError on all of them if they disagree, on a GPU a step
        later.
        """
        is_partial = self.validity.partial is not None
        self._exchange(
            (reduction, group.weights, [ShardStatus.PARTIAL] * len(group.weights) if is_partial else group.statuses())
            for group, (reduction, _) in zip(self.cast_groups, self.reductions, strict=True)
            if any(weight.group.sent_cast != self.generation for weight in group.weights)
        )

    def exchange_statuses(self) -> bool:
        """Report masters that were written to to all ranks. Return True if masters of some weight
        were on all ranks that have rows of it. Raises RuntimeError as in `exchange_finite`.
        """
        of_reductions = [
            (reduction, [weight for group in groups for weight in group.weights])
            for reduction, groups in self.reductions
        ]
        return self._exchange((reduction, weights, shard_statuses(weights)) for reduction, weights in of_reductions)

    def _exchange(self, statuses: Iterable[tuple[ReductionGroup, Sequence[FSDPWeight], Sequence[ShardStatus]]]) -> bool:
        """Exchange the statuses of weights in each of their reductions, and raise after the last.

        A rank that has found a disagreement still takes part in the remaining reductions and sends
        REFUSED, since their other ranks may not be in the reduction where it was found.
        """
        problem: InvalidWeights | None = None
        any_written = False
        for reduction, weights, here in statuses:
            sent = here if problem is None else [ShardStatus.REFUSED] * len(here)
            names = [weight.name for weight in weights]
            try:
                written = self.status.exchange(names, sent, self.generation, reduction.group, reduction.device)
            except InvalidWeights as error:
                problem = problem or error
            else:
                any_written |= written
        if problem is not None:
            raise problem
        return any_written

    # -- verification

    def master_views(self) -> Iterator[MasterViews]:
        """Yield the masters of each group with the weights that a forward pass computes with.
        Collective.

        Groups that are not gathered are gathered, and freed again. As in a forward pass, a gather
        casts first if that is due.
        """
        self.check_sharded()
        self.status.check()
        for group in torch_fsdp.groups(self.model):
            weights = [weight for weight, _ in prepared_params(group, set(self.weights))]
            if weights:
                with torch_fsdp.while_gathered(group):
                    shard_group = Group.of(weights[0].shard_mesh)
                    self.status.check()
                    yield MasterViews(shard_group, tuple(map(self._owned, weights)), transient=True)

    def _owned(self, weight: FSDPWeight) -> MasterView:
        if weight.inner_shards is not None:
            span, flat = _rows_of_inner_shards(weight.inner_shards, weight)
        else:
            span = weight.geometry.span_in_weight
            flat = weight.local.plain.view(-1) if span.numel else None
        slices = None
        if weight.sliced:
            slices = next(reduction.group for reduction, groups in self.reductions if weight.group in groups)
        return MasterView(weight.name, weight.live, flat, span, self.cast_scale(weight.name), slices)


def _rows_of_inner_shards(inner_shards: InnerShards, weight: FSDPWeight) -> tuple[Span, Tensor | None]:
    """Return (elements, their master) of the rows of a weight that this rank would have if rows
    were sharded. Collective: the shards of all ranks are joined.
    """
    ranks, local = Group.of(weight.shard_mesh), weight.local.plain.to(weight.live.device)
    gathered = torch.empty(ranks.size * local.numel(), dtype=local.dtype, device=local.device)
    ranks.all_gather_into(gathered, local.view(-1), what=f"the master of {weight.name}")
    whole = torch.empty_like(gathered)
    target, source = inner_shards.copy_of_elements(whole, gathered)
    target.copy_(source)
    rows, columns = matrix_shape(inner_shards.shape)
    own = RowShards(rows, -(-rows // ranks.size), ranks.size).span(ranks.rank)
    span = Span(own.start * columns, own.stop * columns)
    return span, whole[span.start : span.stop].clone() if span.numel else None
