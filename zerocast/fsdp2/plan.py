"""ShardPlan: the plan by which a CastManager casts masters that FSDP2 shards.

It finds where the masters are and which ranks reduce amaxes together, and has a CastGroup for each
reduction.
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
from zerocast.distributed.row_shards import MAX_KEPT_BYTES, InnerShards, RowShards, weight_layout
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

# (the ranks that reduce together, weights, the status of this rank's shard of each).
StatusesOfReduction = tuple[ReductionGroup, Sequence[FSDPWeight], Sequence[ShardStatus]]


class ShardPlan(Plan):
    """The cast of all prepared weights of one model.

    Args:
        model: the module that was prepared. It is not kept alive.
        weight_mesh: the ranks that reduce the amaxes of a weight; by default those that FSDP2
            shards it over.
        keep_codes: True if codes are kept from one cast to the next; None decides by their size.

    Attributes:
        verify_every: as in `prepare`, which sets it, for ranks to compare. Fixed.
        names: the first name of each prepared weight, keyed by all of its names. Fixed after
            `prepare`.
        cast_number: the number of the last cast, counted from 1; 0 before the first. The same on
            all ranks, or gathers raise. (`Validity.casts` of a weight counts its gathers instead.)
        validity: the validity of all masters together, which records steps and loads that failed
            partway. Fixed.
        status: compares the headers of gathers. Fixed.
        param_groups: FSDP2's parameter groups. Empty until FSDP2 has sharded the model.
        reductions: the ranks that reduce amaxes together, with their parameter groups. Empty until
            the first `bind`, then fixed.
        addresses: the addresses of the masters, and their version counters at the last cast.
            Replaced by a `bind` that finds masters moved.
        cast_groups: a CastGroup for each of `reductions`. Replaced by a `bind` that finds masters
            moved. Empty before the first `bind`, and after one that raised.
        written: the names of the weights whose masters this rank knows to have changed since the
            last cast.
        stepped: the names of the weights that optimizers have stepped, or a load or `refresh` may
            have changed, since the last cast. The same on all ranks.
        may_have_moved: True if the storage of masters may have changed since the last gather.
        replica_only_casts: the number of casts that this replica (HSDP) has made without the others
            since the last cast of all replicas. None during such a cast.
    """

    def __init__(self, model: nn.Module, weight_mesh: DeviceMesh | None, keep_codes: bool | None) -> None:
        self._model = weakref.ref(model)
        self.weight_mesh = weight_mesh
        self.keep_codes = keep_codes
        self.verify_every: int | None = None
        # The prepared weights, keyed by name.
        self._weights: dict[str, weakref.ref[FSDPWeight]] = {}
        self.names: dict[str, str] = {}
        self.validity = Validity(LOAD, advice=ADVICE)
        self.status = GatherStatus(self.validity)
        self.param_groups = ParamGroups()
        self.reductions: list[tuple[ReductionGroup, list[ParamGroup]]] = []
        # The value of `reductions` from the first `bind` on. Empty until ranks agree.
        self._agreed: list[tuple[ReductionGroup, list[ParamGroup]]] = []
        self._caller = Caller("zerocast.fsdp2", "cast")
        self.addresses = MasterAddresses({})
        self.cast_groups: list[CastGroup] = []
        # True once masters are found in different storage, until cast groups are built over it.
        self._must_bind = True
        # The delayed scaling of each weight that has it, by name. It belongs to the last cast group
        # of the weight, and the next cast group continues from its state.
        self._scaling: dict[str, DelayedScaling] = {}
        self.cast_number = 0
        self.replica_only_casts: int | None = 0
        self.written: set[str] = set()
        self.stepped: set[str] = set()
        # The values of both at the last cast.
        self._changed: set[str] = set()
        # True if a master got a new wrapper since the last `bind`, which may be over different
        # storage.
        self._is_rewrapped = False
        self.may_have_moved = False
        # True if gathers send the codes of the last cast until the backward pass ends.
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
        return living(self._weights.values())

    def add(self, weight: FSDPWeight) -> None:
        """Add a weight, before the first cast."""
        self._weights[weight.name] = weakref.ref(weight)

    @property
    def has_peers(self) -> bool:
        """True if other ranks hold shards or replicas of the same masters."""
        return any(reduction.group.size > 1 or reduction.replicas.size > 1 for reduction, _ in self.reductions)

    @property
    def changed_weights(self) -> list[FSDPWeight]:
        """The weights whose masters had changed at the last cast, as far as this rank knew."""
        return living([self._weights[name] for name in self._changed])

    # -- events of masters
    #
    # event                            told by                        effect
    # an optimizer steps               CastManager.make_due           `stepped`; next gather casts
    # the step has measured masters    FusedAdamW                     the next cast uses its amaxes
    # an operator writes a master      FSDPWeight.after_write         amaxes dropped, `written`
    # a compiled function writes one   version counters               the same, before they are used
    # a master has moved               `bind`, `mark_moved`           `written`
    # a plain parameter is written     version counters               all weights `written`
    # a master gets a new wrapper      MasterParameter                `bind` compares addresses
    #
    # `FSDPWeight.mark_written` adds a weight to `written`. The header of the next gather reports
    # it, unless a cast comes first, which empties `written`.

    def mark_rewrapped(self) -> None:
        """Called when a master gets a new wrapper, which may be over different storage."""
        self._is_rewrapped = True
        self.may_have_moved = True

    # -- casts

    def check_same_call(self, what: str) -> None:
        """In debug mode, raise on every rank unless all ranks make this call after as many
        casts.
        """
        if debugging():
            for reduction, _ in self.reductions:
                check_same_call(reduction.group, f"{what} after cast {self.cast_number}")

    def _announce(self, detail: str) -> None:
        # Ranks report errors in the headers of gathers, which the next step reads before it casts.
        self.check_same_call(detail or "casts and gathers")

    def _follow(self) -> None:
        if self._holds_codes:
            self.keep_codes = True
            self._holds_codes = False
            self._must_bind = True
        self.bind()
        self.addresses.check_memory()
        self._caller.number = self.cast_number + 1
        self.forget_old_amaxes()

    def _writing(self, masters: bool) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def _saved(self) -> Callable[[], None]:
        # `CastManager.cast` undoes a cast that raises.
        return lambda: None

    def saved(self) -> Callable[[], None]:
        """Return a function that restores delayed scaling and the record of changes, to call if a
        cast raises. Nothing reads the bytes of such a cast, since the next gather casts first.
        """
        written, stepped = self.written, self.stepped
        scaling = [group.delayed.saved() for group in self.cast_groups]

        def restore() -> None:
            self.written, self.stepped = self.written | written, self.stepped | stepped
            for restore_scaling in scaling:
                restore_scaling()

        return restore

    def launch(
        self,
        *,
        skip: Tensor | None = None,
        update: AdamUpdate | None = None,
        repeat: bool = False,
        in_graph: bool = False,
    ) -> None:
        """Do the device's part of a cast. In a CUDA graph (`in_graph`) the device counts the
        casts.
        """
        for group in self.cast_groups:
            self._set_replica_flags(group, is_refused=self.validity.partial is not None)
            group.cast(repeat)
            group.stamp(None if in_graph else self.cast_number + 1)

    def done(self, *, repeat: bool = False) -> None:
        """Do the CPU's part of a cast, after the device's part was launched."""
        self.addresses.record_versions()
        self._count_cast()
        if self.status.problem is not None:
            self.status.problem = None
            for group in self.cast_groups:
                group.set_masters_readable(is_readable=True)
        self._changed = self.written | self.stepped
        self.written, self.stepped = set(), set()
        if debugging():
            for weight in self.weights:
                weight.validity.cast()

    def join_collectives(self, gather: Callable[[], None] | None = None) -> None:
        """Take part in the reductions of the ranks that can cast. The headers of the next gather
        then report REFUSED for this rank, so that all ranks raise there.
        """
        assert self.problem is not None
        if not self.cast_groups:
            # This rank has nothing to send, since allocating it failed.
            raise self.problem
        self.status.problem = self.problem
        for group in self.cast_groups:
            self._set_replica_flags(group, is_refused=True)
            group.join_collectives()
            group.stamp(self.cast_number + 1)
        self._count_cast()

    @contextlib.contextmanager
    def single_replica_cast(self) -> Iterator[None]:
        """While the context is open, casts are made by this replica only. The next cast that all
        ranks make compares `replica_only_casts` and so detects them.
        """
        casts_before = self.replica_only_casts or 0
        self.replica_only_casts = None
        try:
            yield
        finally:
            self.replica_only_casts = casts_before + 1

    def _set_replica_flags(self, group: CastGroup, is_refused: bool) -> None:
        group.amaxes.is_refused = is_refused
        group.amaxes.replica_only_casts = self.replica_only_casts

    def _count_cast(self) -> None:
        self.cast_number += 1
        if self.replica_only_casts is not None:
            self.replica_only_casts = 0

    # -- amaxes that optimizer steps measure

    def forget_old_amaxes(self) -> None:
        """Drop measured amaxes if compiled functions have written masters since they were measured.
        Called before a step measures more, and before a cast uses them.
        """
        measured = any(group.amaxes.measured for group in self.cast_groups)
        if measured and self.addresses.any_written():
            self.forget_amaxes()

    def after_step(self) -> None:
        """Called after a step has measured amaxes. Later writes outdate them."""
        self.addresses.record_versions()

    def forget_amaxes(self) -> None:
        """Drop measured amaxes, so that the next cast measures all masters."""
        for group in self.cast_groups:
            # Every operator that writes a master comes here, and most find nothing to drop.
            if group.amaxes.measured:
                group.amaxes.measured = frozenset()

    # -- codes and tables that are held

    def hold_codes(self) -> None:
        """Let all gathers until the next cast send the codes of the masters as they are now, since
        optimizers are about to step inside a backward pass. Keep codes from the next cast on.
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
        """True if the next cast computes the first scales of delayed scaling, which needs the
        CPU.
        """
        return any(group.delayed.unseeded for group in self.cast_groups)

    # -- where masters are

    def bind(self) -> None:
        """Find the masters, and build cast groups over them if they have moved. The first call is
        collective: all ranks agree on the weights. Later calls are local.

        Raises RuntimeError or TypeError, on this rank only, for masters that cannot be cast.
        """
        if not self.reductions:
            self._agree()
            self.reductions = self._agreed
            # Each weight watches its own masters.
            self.validity.watch([], sharded=self.has_peers)
        if self._must_bind or self.has_moved():
            self._must_bind = True
            self._locate_masters()
            self._build_cast_groups()
            self._must_bind = False
        self._is_rewrapped = False
        self.may_have_moved = False

    def _agree(self) -> None:
        """Let all ranks agree on the weights, once FSDP2 has sharded the model. The first call is
        collective and raises on all ranks, later calls do nothing.
        """
        if not self._agreed:
            self._adopt()
            self._agreed = list(self._find_reductions())

    def _locate_masters(self) -> None:
        # The buffers of all weights will be new and empty. The next gather reports this, unless a
        # cast fills them before. A switch of formats that fails restores the set as it was.
        self.written = {*self.written}
        for weight in self.weights:
            weight.mark_written()
        for weight in self.weights:
            weight.locate()
        self.addresses = MasterAddresses({weight.name: weight.param for weight in self.weights})

    def _build_cast_groups(self) -> None:
        keep_codes = self._should_keep_codes()
        scaling = self._seeded_scaling()
        # Free the memory of the old groups before the new ones allocate theirs.
        self.cast_groups = []
        self.cast_groups = [CastGroup(groups, reduction, keep_codes, scaling) for reduction, groups in self.reductions]
        # If building tables raises on this rank, it still has cast groups, by which it takes part
        # in the casts of the others.
        for group in self.cast_groups:
            group.build_tables()
        self._scaling = {name: group.delayed for group in self.cast_groups for name in group.delayed.state_dict()}

    def _should_keep_codes(self) -> bool:
        if any(weight.must_keep_codes for weight in self.weights):
            return True
        if self.keep_codes is not None:
            return self.keep_codes
        return sum(weight_layout(weight.geometry).codes_nbytes for weight in self.weights) <= MAX_KEPT_BYTES

    def rebuild(self, changed: Sequence[str]) -> None:
        """Build cast groups after the weights `changed` have got new formats. Local."""
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
        continue. Weights whose first scale no cast has computed yet are left out.
        """
        # Weights of one cast group share a DelayedScaling.
        distinct = {id(scaling): scaling for scaling in self._scaling.values()}
        states: dict[str, dict[str, Tensor]] = {}
        for scaling in distinct.values():
            states |= scaling.state_dict()
        return {name: states[name] for name, scaling in self._scaling.items() if name not in scaling.unseeded}

    def has_moved(self) -> bool:
        """Return True if the storage of masters has changed since the last `bind`. A master that
        moves gets a new wrapper, so addresses are compared only after that, or in debug mode.
        """
        return (self._is_rewrapped or debugging()) and self.addresses.has_moved()

    def mark_moved(self) -> None:
        """Mark masters as written that are in different storage than at the last `bind`, so that
        the headers of the next gather report them.
        """
        self.may_have_moved = False
        moved_names = self.addresses.moved_names()
        if moved_names:
            for weight in self.weights:
                if weight.name in moved_names:
                    weight.mark_written()

    def check_sharded(self) -> None:
        """Raise RuntimeError unless FSDP2 manages all prepared weights, and all ranks have prepared
        the same. Called from the first forward pass on: ranks with other weights reach their first
        cast in different gathers, and would wait for each other there. Does nothing while any
        parameter is on the meta device.
        """
        if not self._agreed and not any(parameter.is_meta for parameter in self.model.parameters()):
            self._agree()

    def _adopt(self) -> None:
        """Find the prepared weights in the groups of FSDP2, once it has sharded the model. Raises
        RuntimeError if it does not manage all of them.
        """
        self.param_groups.find(self.model, set(self.weights), self.status)
        managed = {name for group in self.param_groups.prepared for name in group.names}
        # The FSDPWeight of each parameter by its current name, None for a plain parameter.
        current_weights = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            local = getattr(parameter, "_local_tensor", parameter)
            current_weights[name] = getattr(local, "weight", None)
        for name, first_name in self.names.items():
            # The parameter of this name was removed, or a wrapper has renamed it.
            if name not in current_weights:
                continue
            weight = current_weights[name]
            is_other_weight = weight is not None and weight.name != first_name and first_name not in managed
            if weight is None or is_other_weight:
                raise RuntimeError(f"{name} is prepared, and another parameter is in its place now: {REPLACED}")
        missing = sorted(weight.name for weight in self.weights if weight.name not in managed)
        if missing:
            raise RuntimeError(
                f"{missing[0]} is prepared, and no FSDP module inside the prepared model manages it: {NOT_SHARDED}"
            )

    def _find_reductions(self) -> Iterator[tuple[ReductionGroup, list[ParamGroup]]]:
        """Find which ranks reduce amaxes together, once FSDP2 has sharded the model. Collective.

        Raises ValueError or TypeError, on every rank, for weights that any rank cannot cast.
        """
        by_mesh: dict[tuple[str, Group], list[ParamGroup]] = {}
        for group in self.param_groups.prepared:
            mesh_name = self._reduction_mesh(group.weights[0]).get_group().group_name
            by_mesh.setdefault((mesh_name, group.replicas), []).append(group)
        for (_, replicas), groups in by_mesh.items():
            weights = [weight for group in groups for weight in group.weights]
            mesh = self._reduction_mesh(weights[0])
            mesh_group = Group.of(mesh).called_by(self._caller)
            problems = (weight.problem(self.weight_mesh) for weight in weights)
            problem = next((problem for problem in problems if problem), None)
            # Replicas too: they reduce no amaxes together, and would compute with other weights.
            fingerprints = [weight.fingerprint for weight in weights]
            settings = {"verify_every": self.verify_every}
            validate_across_ranks([replicas, mesh_group], fingerprints, problem, "prepares a model", settings)
            # Tensor parallelism slices weights, and FSDP2 shards each slice over some of the ranks
            # of the mesh. The first of these ranks identifies the slice.
            mesh_ranks = dist.get_process_group_ranks(mesh.get_group())
            first_rank = min(dist.get_process_group_ranks(weights[0].shard_mesh.get_group()))
            is_first = largest_of_ranks(
                mesh_group, [rank == first_rank for rank in mesh_ranks], "the slices of weights"
            )
            slice_ranks = [rank for rank, has_slice in zip(mesh_ranks, is_first, strict=True) if has_slice]
            reduction = ReductionGroup(
                group=mesh_group,
                device=mesh.device_type,
                tp_rank=slice_ranks.index(first_rank),
                tp_size=len(slice_ranks),
                replicas=replicas.called_by(self._caller),
            )
            yield reduction, groups

    def _reduction_mesh(self, weight: FSDPWeight) -> DeviceMesh:
        return self.weight_mesh if self.weight_mesh is not None else weight.shard_mesh

    # -- exchanges between ranks without a gather

    def exchange_finite(self) -> None:
        """Report to all ranks the masters that are partial, and those that were NaN or Inf in a
        cast whose headers no gather has sent. Raises RuntimeError on all ranks if they disagree, on
        a GPU a step later.
        """
        self._exchange(self._unsent_cast_statuses())

    def _unsent_cast_statuses(self) -> Iterator[StatusesOfReduction]:
        for group, (reduction, _) in zip(self.cast_groups, self.reductions, strict=True):
            weights = group.weights
            if all(weight.group.sent_cast == self.cast_number for weight in weights):
                continue
            is_partial = self.validity.partial is not None
            yield reduction, weights, [ShardStatus.PARTIAL] * len(weights) if is_partial else group.statuses()

    def exchange_statuses(self) -> bool:
        """Report to all ranks the masters that were written. Return True if masters of some weight
        were written on all ranks that have rows of it. Raises RuntimeError as `exchange_finite`
        does.
        """
        return self._exchange(self._current_statuses())

    def _current_statuses(self) -> Iterator[StatusesOfReduction]:
        for reduction, groups in self.reductions:
            weights = [weight for group in groups for weight in group.weights]
            yield reduction, weights, shard_statuses(weights)

    def _exchange(self, all_statuses: Iterable[StatusesOfReduction]) -> bool:
        """Exchange the statuses of each reduction over its ranks, and raise after the last one.

        A rank that has found a disagreement still takes part in the remaining reductions and sends
        REFUSED, since the other ranks of those may not take part where it was found.
        """
        problem: InvalidWeights | None = None
        any_written = False
        for reduction, weights, statuses in all_statuses:
            sent = statuses if problem is None else [ShardStatus.REFUSED] * len(statuses)
            names = [weight.name for weight in weights]
            try:
                written = self.status.exchange(names, sent, self.cast_number, reduction.group, reduction.device)
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

        Groups that are not gathered are gathered meanwhile. As in a forward pass, a gather casts
        first if a cast is due.
        """
        self.check_sharded()
        self.status.check()
        for group in torch_fsdp.groups(self.model):
            weights = [weight for weight, _ in prepared_params(group, set(self.weights))]
            if weights:
                with torch_fsdp.while_gathered(group):
                    shard_group = Group.of(weights[0].shard_mesh)
                    self.status.check()
                    yield MasterViews(shard_group, tuple(map(self._master_view, weights)), transient=True)

    def _master_view(self, weight: FSDPWeight) -> MasterView:
        if weight.inner_shards is not None:
            span, master = _gather_row_shard(weight.inner_shards, weight)
        else:
            span = weight.geometry.span_in_weight
            master = weight.local.plain.view(-1) if span.numel else None
        slices = None
        if weight.sliced:
            slices = next(reduction.group for reduction, groups in self.reductions if weight.group in groups)
        return MasterView(weight.name, weight.live, master, span, self.cast_scale(weight.name), slices)


def _gather_row_shard(inner_shards: InnerShards, weight: FSDPWeight) -> tuple[Span, Tensor | None]:
    """Return the span of elements that this rank would have if the rows of the weight were sharded,
    and their master values, or None if it would have none. Gathers the inner shards of all ranks.
    """
    group = Group.of(weight.shard_mesh)
    shard = weight.local.plain.to(weight.live.device)
    gathered = torch.empty(group.size * shard.numel(), dtype=shard.dtype, device=shard.device)
    group.all_gather_into(gathered, shard.view(-1), what=f"the master of {weight.name}")
    full = torch.empty_like(gathered)
    target, source = inner_shards.copy_of_elements(full, gathered)
    target.copy_(source)
    rows, columns = matrix_shape(inner_shards.shape)
    own_rows = RowShards(rows, -(-rows // group.size), group.size).span(group.rank)
    span = Span(own_rows.start * columns, own_rows.stop * columns)
    return span, full[span.start : span.stop].clone() if span.numel else None
