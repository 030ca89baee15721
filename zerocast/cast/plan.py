"""CastPlan: the cast of a list of weights, prepared once and repeated after every step."""

import abc
import contextlib
import functools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zerocast.cast.adam_update import AdamUpdate
from zerocast.cast.amaxes import PlanAmaxes, SplitBlocks, layout_of_plan
from zerocast.cast.columnwise import ColumnwiseCopies
from zerocast.cast.cpu_masters import CpuTable, cpu_tensor
from zerocast.cast.delayed_scaling import DelayedScaling
from zerocast.cast.partition import Partition, ShardData, partition
from zerocast.cast.pipeline import cast
from zerocast.cast.step_hooks import StepHooks
from zerocast.cast.switch import SwitchedBytes, SwitchPart, convert, share_cast_bytes
from zerocast.cast.tables import StorageSnapshot, WeightTable, WeightTables, amax_offsets_of_matrix
from zerocast.distributed.group import Caller, Group, GroupLike
from zerocast.formats import FormatSpec
from zerocast.formats.layout import Span
from zerocast.verification.master_views import MasterView, MasterViews
from zerocast.weight import QuantizedWeight
from zerocast.weight.owners import Claim, pop_deferred_error, train
from zerocast.weight.state import WeightState
from zerocast.weight.validity import InvalidWeights, Use, Validity, changed_together

_state_of: Callable[[QuantizedWeight], WeightState] = operator.attrgetter("state")

# The number of plans that were built in each process group, keyed by its name.
_built: Counter[str] = Counter()


class Plan(abc.ABC):
    """A cast of a framework's weights, prepared once and repeated after every step. The casts of
    all frameworks run through `ready` and `run`.

    Attributes:
        validity: the validity of the weights, for as long as the plan lives.
        problem: the reason why this rank cannot make the current cast. None if it can. Each `ready`
            sets it.
    """

    validity: Validity
    problem: Exception | None = None

    @property
    @abc.abstractmethod
    def has_peers(self) -> bool:
        """True if other ranks cast parts of the same weights."""

    def ready(self, detail: str = "", find: Callable[[], None] | None = None, problem: Exception | None = None) -> None:
        """Do the CPU's part before a cast: find weights and masters where they are now.

        An error on this rank is raised here if no other rank shares the weights. Otherwise `run`
        raises it on every rank, since a rank that raised alone would leave the others waiting in
        their next collective. This includes an error that an earlier step has stored
        (`owners.check_gradients`).

        Args:
            detail: a description of the cast, such as the learning rates of its step. All ranks
                must pass the same text.
            find: finds masters and weights for the framework, before the plan does. None if it has
                nothing to find.
            problem: a problem that this rank has found before this call.

        Raises RuntimeError on every rank, on a GPU one cast later, if one all-reduce combined the
        amaxes of different casts: of two plans, or of casts with different descriptions.
        """
        self._announce(detail)
        try:
            if find is not None:
                find()
            self._follow()
        except (RuntimeError, TypeError, ValueError) as error:
            problem = problem or error
        if self.has_peers:
            problem = problem or pop_deferred_error()
        elif problem is not None:
            raise problem
        self.problem = problem

    def run(
        self,
        *,
        skip: Tensor | None = None,
        update: AdamUpdate | None = None,
        repeat: bool = False,
        gather: Callable[[], None] | None = None,
    ) -> None:
        """Cast after `ready`, with the arguments of `CastPlan.cast`. Collective.

        `gather` makes the gather that the caller begins after the cast. A rank with a problem takes
        part in it before it raises.
        """
        if self.problem is not None:
            self.join_collectives(gather)
            return
        restore = self._saved()
        try:
            with self._writing(masters=update is not None):
                self.launch(skip=skip, update=update, repeat=repeat)
                self.done(repeat=repeat)
        except BaseException:
            restore()
            raise
        self._raise_delayed_reports()

    @abc.abstractmethod
    def join_collectives(self, gather: Callable[[], None] | None = None) -> None:
        """Take part in the collectives of a cast that this rank cannot make, so that all ranks
        raise. A CastPlan also takes part in the `gather` after it, and raises here. A ShardPlan
        returns: the header of the next gather, which FSDP2 begins, makes all ranks raise.
        """

    @abc.abstractmethod
    def launch(self, *, skip: Tensor | None = None, update: AdamUpdate | None = None, repeat: bool = False) -> None:
        """Do the device's part of a cast, between `ready` and `done`."""

    @abc.abstractmethod
    def done(self, *, repeat: bool = False) -> None:
        """Do the CPU's part after a cast."""

    @abc.abstractmethod
    def master_views(self) -> Iterable[MasterViews]:
        """Return the masters with their weights, for `zerocast.verify`."""

    @abc.abstractmethod
    def _announce(self, detail: str) -> None:
        """Raise the errors of the last cast that ranks have reported, and let ranks compare which
        cast each of them is going to make.
        """

    @abc.abstractmethod
    def _follow(self) -> None:
        """Find masters and weights where they are now. Raises on this rank only."""

    @abc.abstractmethod
    def _writing(self, masters: bool) -> contextlib.AbstractContextManager[object]:
        """Return a context for the launch of a cast, which also steps the masters if `masters`."""

    @abc.abstractmethod
    def _saved(self) -> Callable[[], None]:
        """Return a function that restores delayed scaling, which `run` calls if the launch
        raises.
        """

    def _raise_delayed_reports(self) -> None:  # noqa: B027 (nothing to raise where ranks report at once)
        """Raise the errors that ranks reported of casts that the device has completed by now."""


class CastPlan(Plan):
    """Casts FP32 master shards into quantized weights, every step the same way.

    The caller gathers the bytes after a cast, and then calls `post_all_gather`.

    Args:
        model_weights: the QuantizedWeights, the same list on every rank.
        master_weights: for each weight, the flat contiguous master of the elements that this rank
            owns, FP32 or the nominal dtype; None or an empty tensor where it owns none. A master in
            CPU memory is cast there, and its codes are copied to the weight. A plan with such
            masters takes no `update` and no `scale_cuts`, and no CUDA graph holds its casts. A cast
            reads them immediately, so wait first for copies that a GPU makes into them.
        start_offsets: for each weight, the row-major position of the master's first element.
        group: the ranks that share the masters: a ProcessGroup, a one-dimensional DeviceMesh, or
            None for the default group, or for one process if there is none.
        fsdp_shard_model_weights: for each weight, separate storage for the codes of the owned
            elements: a contiguous tensor with the dtype and device of `weight.rowwise_data`, whose
            first byte holds the element at the start offset; for mxfp8 a (rowwise, columnwise) pair
            of them. The weight's own data is then not written. None to write that.
        backend: a name from `zerocast.backends`; None to choose one.
        param_groups: for each weight, the row of its scalars in an AdamUpdate, or None if that
            leaves its master as it is. None for casts without an AdamUpdate.
        names: the names of the weights in states and reports; None for `weight 0`, `weight 1` and
            so on.
        scale_cuts: None if every rank computes all scales of a weight. If the caller all-gathers
            the scale buffers like the codes, each rank's part in proportion to its span: for each
            weight, the boundaries between the spans of ranks, in elements. A rank then computes the
            scales of its own part, and only the amaxes of blocks that a boundary splits are
            reduced. For mxfp8 rows and columns must be multiples of 128, boundaries multiples of
            32.
        validity: the validity of the weights, or of more that is written together with them; None
            for a new one.
        claim: the owner's claim on these weights. None while the plan has no owner.
        raises_together: True to raise an error of one rank on all ranks in the same cast, also on a
            GPU, for which the CPU waits in each cast. Otherwise a GPU's other ranks raise it in
            their next cast.

    Spans may leave gaps, whose bytes are never written. A weight without a master on any rank stays
    as it is. The constructor is collective: it raises TypeError or ValueError on every rank for an
    argument that is wrong on any. Afterwards a cast communicates by one all-reduce.

    A plan takes weights over from an older plan without an owner. Raises ValueError, with nothing
    changed, if an owner that still exists (an attached plan, a ZeroAdamW) writes any of these
    elements. A later cast raises it too.
    """

    def __init__(
        self,
        model_weights: Sequence[Any],
        master_weights: Sequence[Tensor | None],
        start_offsets: Sequence[int | None],
        group: GroupLike = None,
        *,
        fsdp_shard_model_weights: Sequence[ShardData | None] | None = None,
        backend: str | None = None,
        param_groups: Sequence[int | None] | None = None,
        names: Sequence[str] | None = None,
        scale_cuts: Sequence[range | None] | None = None,
        validity: Validity | None = None,
        claim: Claim | None = None,
        raises_together: bool = False,
    ) -> None:
        given, self._own_caller = Group.of(group), Caller("a CastPlan", "cast")
        self.group = given.called_by(self._own_caller)
        # Without this each attribute of a weight takes microseconds, through `__torch_function__`.
        with torch._C.DisableTorchFunctionSubclass():
            self._partition = partition(
                self.group,
                model_weights,
                master_weights,
                start_offsets,
                fsdp_shard_model_weights,
                backend,
                scale_cuts,
                is_overridable=lambda other: other is claim,
            )
        # Set by a switch of formats, to compare the bytes of ranks until a gather has given all of
        # them the same new bytes. None otherwise.
        self._switched: SwitchedBytes | None = None
        # True if an optimizer made this plan. Ranks then also compare the number of its step.
        self._compares_steps = given.caller is not None
        self._raises_together = raises_together
        self.weights: list[QuantizedWeight] = [shard.weight for shard in self._partition.shards]
        # The indices of the weights that have a master on any rank, for as long as the plan lives.
        # A weight without a master on any rank is frozen.
        self._cast_indices = [i for i in range(len(self.weights)) if self._partition.ownership.owned[i] > 0]
        self._step_hooks = StepHooks(self._partition, self._cast_indices, self.group, claim)
        self.backend = self._partition.backend
        # True if casts take an AdamUpdate.
        self._is_stepped = param_groups is not None
        self._param_groups: Sequence[int | None] = param_groups or [0] * len(self.weights)
        self.validity = validity or Validity()
        self.validity.owner = weakref.ref(self)
        self.validity.has_masters = True
        self.validity.add_precheck(self.check_call, Use.SAVE, Use.SWITCH, Use.ADD)
        self._watch()
        self._is_named = names is not None
        self._names = [f"weight {i}" for i in range(len(self.weights))] if names is None else list(names)
        # True until the first cast, which drops the values that the weights were quantized from.
        self._keeps_initial_values = True
        with torch._C.DisableTorchFunctionSubclass():
            self._lay_out()
        if claim is None:
            # By parameter, so that weights still count as trained after `.data =` gave them
            # different storage.
            train(self, [self.weights[index] for index in self._cast_indices])

    def __repr__(self) -> str:
        formats = Counter(str(weight.format) for weight in self.weights)
        owned = sum(shard.span.numel for shard in self._partition.shards)
        whole = sum(weight.numel() for weight in self.weights)
        return (
            f"CastPlan({', '.join(f'{count} x {name}' for name, count in formats.items())}; {owned:,} of {whole:,} elements "
            f"on rank {self.group.rank} of {self.group.size}, backend {self.backend})"
        )

    def cast(self, *, skip: Tensor | None = None, update: AdamUpdate | None = None, repeat: bool = False) -> None:
        """Cast the masters as they are now. Collective: one all-reduce for all weights. An `update`
        with 8-bit moments makes a second one, of the largest values of the groups that ranks share.

        Args:
            skip: bool[1] on the device. If it holds True nothing changes.
            update: an optimizer step that the masters take first.
            repeat: True to repeat the last cast, possibly from changed masters, without advancing
                delayed scaling.

        After an exception during the cast the weights cannot be read until another cast has
        completed. Raises RuntimeError, on every rank, if the masters of the last cast were NaN or
        Inf. An error in the masters of one rank now is raised on every rank too. On a GPU that rank
        raises it now and the others in their next cast, without `raises_together`. If that rank
        continues, it must first take part in the gather of the others.
        """
        self.ready(find=functools.partial(self._check_cpu_masters, update) if self._tables.on_cpu else None)
        self.run(skip=skip, update=update, repeat=repeat)
        # With the first cast that writes, masters replace the values that the weights were
        # quantized from. The CPU waits for `skip` until then, unless it captures.
        if not self._keeps_initial_values or (skip is not None and self._is_capturing()):
            return
        if skip is not None and bool(skip):
            self.validity.skipped()
            return
        self._keeps_initial_values = False
        for index in self._cast_indices:
            self.weights[index].high_precision_init_val = None

    def _is_capturing(self) -> bool:
        """Return True while a CUDA graph captures this cast, during which the CPU cannot wait for
        the device.
        """
        return self._partition.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @property
    def tables(self) -> list[WeightTable]:
        """The tables that a cast works by."""
        return [*self._tables.owned, *self._tables.boundary]

    @property
    def has_peers(self) -> bool:
        """True if other ranks share the masters."""
        return self.group.size > 1

    def _announce(self, detail: str) -> None:
        # Before an optimizer step the device has run a forward and a backward pass since the last
        # cast, so reading the reports of that cast costs no wait. Other casts may follow each other
        # immediately. Their reports are read after the next cast was launched
        # (`_raise_delayed_reports`), so that the device has work while the CPU waits.
        reads_last_cast = self._is_stepped or not self.amaxes.reports.reads_late
        self._check_reports(casts_in_flight=0 if reads_last_cast else 1)
        if self._switched and self._switched.check():
            self._switched = None
        if self.amaxes.reports.compares_calls:
            step = f" {self.group.caller}" if self._compares_steps else ""
            self.amaxes.reports.announce(f"casts by plan {self._number} of its group{step}{detail}")

    def _writing(self, masters: bool) -> contextlib.AbstractContextManager[object]:
        return self.validity.transaction("a cast", masters=masters)

    def _saved(self) -> Callable[[], None]:
        return self.delayed.saved()

    def _raise_delayed_reports(self) -> None:
        if self.amaxes.reports.reads_late:
            self._check_reports(casts_in_flight=1)

    def join_collectives(
        self,
        gather: Callable[[], None] | None = None,
        what: str = "a cast that not every rank could make",
        masters: bool = False,
    ) -> NoReturn:
        """Take part in the cast that the other ranks make, and raise the problem of this rank.

        On a CPU all ranks raise it in the reduction of amaxes; on a GPU the others raise it at
        their next cast. Weights count as partial, unless no rank could make the cast.

        Args:
            gather: takes part in the gather that the others begin after the cast.
            what: the write that has left the weights partial, for errors.
            masters: True if masters are partial too.
        """
        problem, self.problem = self.problem, None
        assert problem is not None
        reports = self.amaxes.reports
        if reports.compares_calls:
            try:
                self.amaxes.refuse(problem)
            except BaseException:
                self._failed_partway(what, masters)
                raise
            if reports.all_refused:
                raise problem
        self._failed_partway(what, masters)
        if gather is not None:
            gather()
            self.check_call()
        raise problem

    def launch(self, *, skip: Tensor | None = None, update: AdamUpdate | None = None, repeat: bool = False) -> None:
        """Do the device's part of a cast, between `ready` and `done`. With `update` the masters,
        views of one tensor, take that step first.

        A CUDA graph can hold it: it neither waits for the device nor changes anything in Python.
        """
        tables = self._tables
        if tables.on_cpu:
            self._check_cpu_masters(update)
        if update is not None:
            tables.check_update(update)
        cast(
            tables.owned,
            self.amaxes,
            self.delayed,
            boundary=tables.boundary,
            skip=skip,
            update=update,
            repeat=repeat,
        )

    def _check_cpu_masters(self, update: AdamUpdate | None) -> None:
        """Raise RuntimeError if this cast is not supported with masters in CPU memory, which this
        plan has.
        """
        if update is not None:
            raise RuntimeError(
                "an AdamUpdate is not supported with masters in CPU memory: step these masters, then call cast()"
            )
        if self._is_capturing():
            raise RuntimeError(
                "a cast of masters in CPU memory cannot be captured in a CUDA graph, which would repeat only the copies: cast "
                "outside of it, or move the masters to the device"
            )

    def done(self, *, repeat: bool = False) -> None:
        """Do the CPU's part after a cast: count it, and send the reports of ranks."""
        self.validity.cast()
        self._own_caller.number = self.validity.casts + 1
        self.amaxes.reports.send()

    def post_all_gather(self) -> None:
        """Make the columnwise copies of all weights from their gathered rowwise bytes, and mark the
        weights as gathered. Raises RuntimeError before the first cast.
        """
        if not self.validity.casts and not all(w.state.ever_cast for w in self.weights):
            raise RuntimeError("post_all_gather before the first cast: there is nothing to transpose yet")
        self._follow()
        self._columnwise.make()
        if self._switched:
            self._switched.note_gathered()

    def move_masters(
        self,
        master_weights: Sequence[Tensor | None],
        fsdp_shard_model_weights: Sequence[ShardData | None] | None = None,
    ) -> None:
        """Cast different master tensors of the same spans in later casts. Local.

        `fsdp_shard_model_weights` gives the codes different storage, or for None in the list the
        weight's own data. Without it codes go where they went before. Raises ValueError or
        TypeError on this rank only, with nothing changed.
        """
        self._partition.move(master_weights, fsdp_shard_model_weights)
        self._watch()
        self._bind()

    def release_old_memory(self) -> None:
        """Drop the references to memory that masters and weights have left (`.data =`). Local.

        The next cast finds them again.
        """
        self._tables = CastTables([], [], on_cpu=False, stepped=[], snapshot=StorageSnapshot(()))
        # Never the version of a Validity, so the next cast makes the tables again.
        self._storage_version = -1

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Cast after every `step()` of a torch optimizer over the masters, until `remove()` of the
        returned handle. Collective.

        Several optimizers may each update some of the masters. Raises ValueError on every rank,
        with nothing changed, for an optimizer that updates none of this plan's masters, for one
        that this plan is attached to already, and if another owner that still exists (an attached
        plan, a ZeroAdamW) writes any of these elements.
        """
        handle = self._step_hooks.attach(optimizer, self._cast_after_step)
        self._take_weights()
        return handle

    def _cast_after_step(self, changed: Collection[int]) -> None:
        # Of several optimizers each has changed only some of the weights. This comes first, since a
        # cast may be interrupted once it is complete.
        if self._step_hooks.has_one_optimizer:
            self.validity.changed()
        else:
            changed_together([self.weights[index].state for index in changed])
        self.cast()

    def claim(self, who: str) -> Claim:
        """Claim the weights that this plan casts for an owner, as long as the result is kept.

        Raises ValueError, on this rank only, if another owner that still exists writes any of these
        elements.
        """
        return self._step_hooks.claim(who)

    def master_views(self) -> tuple[MasterViews, ...]:
        """Return the masters with their weights, for `zerocast.verify`. Gather the bytes first.

        Weights with gaps are left out. The views of partial weights say so (`MasterViews.problem`).
        Raises what `check_before_collective` raises: the readers' collectives would lack a rank.
        """
        self.check_before_collective()
        problem = None
        try:
            self.validity.check(Use.VERIFY)
        except RuntimeError as error:
            problem = error
        views, left_out = [], []
        for index, (name, shard) in enumerate(zip(self._names, self._partition.shards, strict=True)):
            if self._partition.ownership.covers(index):
                scale = self.delayed.cast_scale(name)
                shown_name = name if self._is_named else None
                views.append(MasterView(shown_name, shard.weight, shard.master, shard.span, scale))
            else:
                left_out.append(name)
        return (MasterViews(self.group, tuple(views), tuple(left_out), problem=problem),)

    def switch_part(self) -> SwitchPart:
        """Return the part of this plan in `zerocast.switch`, which gathers the new bytes once.

        The weights get new buffers, into which the caller has to gather afterwards. If it continues
        with the old ones, the cast after a gather raises RuntimeError on every rank. Weights
        without a master on any rank keep their formats.
        """
        names = self._names if self._is_named else [w.state.name for w in self.weights]
        unique_names = names if all(names) and len({*names}) == len(names) else self._names
        index_of = {unique_names[index]: index for index in self._cast_indices}
        return SwitchPart(
            groups=(self.group,),
            weights={name: (self.weights[i].format, tuple(self.weights[i].shape)) for name, i in index_of.items()},
            plain=(),
            check=lambda formats: self._check_switch({name: index_of[name] for name in formats}),
            convert=lambda formats: self._convert({index_of[name]: fmt for name, fmt in formats.items()}),
            recast=lambda formats: self._recast_switched([index_of[name] for name in formats]),
            changed_by_switch=self.changed_by_switch,
        )

    @property
    def changed_by_switch(self) -> list[Any]:
        """The objects whose attributes a switch of formats changes, and restores if it fails."""
        return [self, *self.validity.records, self._step_hooks, *(w.state for w in self.weights)]

    def check_between_steps(self, use: Use) -> None:
        """Raise RuntimeError if formats or parameters cannot change now, since a write is partial
        or under way.
        """
        self.validity.check(use)
        if self.validity.is_writing:
            raise RuntimeError(f"masters and weights are being written now: make {use.value} between two steps")

    def _check_switch(self, index_of: Mapping[str, int]) -> None:
        self.check_between_steps(Use.SWITCH)
        for name, index in index_of.items():
            problem = self._partition.why_format_is_fixed(index)
            if problem:
                raise RuntimeError(
                    f"{name} cannot be switched, {problem}: build a new plan over weights of the new format"
                )

    def _convert(self, formats: Mapping[int, FormatSpec]) -> None:
        for index, fmt in formats.items():
            convert(self.weights[index], fmt)

    def _recast_switched(self, indices: Sequence[int]) -> None:
        self._switched = None
        self.rebuild({self._names[index] for index in indices})
        self.cast(repeat=True)
        share_cast_bytes(self.group, [self.weights[index] for index in indices])
        self.post_all_gather()
        if self.group.size > 1:
            self._switched = SwitchedBytes(self.group, {self._names[i]: self.weights[i] for i in indices})

    def rebuild(
        self,
        changed: Collection[str],
        weights: Sequence[QuantizedWeight] | None = None,
        scale_cuts: Sequence[range | None] | None = None,
    ) -> None:
        """Prepare casts in the new formats, after the weights `changed` were given these and new
        storage. Collective.

        The next cast fills that storage and seeds the delayed scales of these weights. `weights`
        are all weights, if some of them are other objects than before.
        """
        self.weights = self.weights if weights is None else list(weights)
        shards, to_seed = self._partition.shards, self.delayed.unseeded | {*changed}
        delayed_state = {name: state for name, state in self.delayed.state_dict().items() if name not in to_seed}
        cuts = [shard.cuts for shard in shards] if scale_cuts is None else scale_cuts
        self._partition = partition(
            self.group,
            self.weights,
            [shard.master for shard in shards],
            [shard.span.start for shard in shards],
            [shard.shard_data for shard in shards],
            self.backend,
            cuts,
            is_overridable=self._step_hooks.is_overridable,
        )
        self._step_hooks.partition = self._partition
        self._lay_out()
        self.delayed.load_state_dict(delayed_state)

    def check_call(self, use: Use | None = None) -> None:
        """Raise RuntimeError, on every rank, for errors of the last cast that ranks have reported:
        masters that were NaN or Inf; on a GPU also amaxes that were reduced with those of a
        different cast. Waits for the device.
        """
        self._check_reports(casts_in_flight=0)

    def check_before_collective(self) -> None:
        """Raise RuntimeError, on every rank, if a rank could not make the last cast on a GPU.
        Called before a collective that is not part of a cast, in which that rank would be missing.
        """
        if self.amaxes.reports.differ():
            self.check_call()

    def _check_reports(self, casts_in_flight: int) -> None:
        try:
            self.amaxes.reports.check(casts_in_flight)
        except InvalidWeights:
            raise
        except (RuntimeError, TypeError, ValueError):
            self._failed_partway("a cast with ranks in different calls")
            raise

    def _failed_partway(self, what: str, masters: bool = False) -> None:
        # A cast does not complete partial masters, so their record stays. A step or a load of which
        # this cast is a part leaves its own.
        if not (self.validity.is_writing or self.validity.has_partial_masters):
            self.validity.failed_partway(what, masters=masters)

    def forget_call(self) -> None:
        """Forget the reports of the last cast, since every rank overwrites its masters now."""
        self.amaxes.reports.forget()

    def _watch(self) -> None:
        masters = [shard.master for shard in self._partition.shards if shard.master is not None]
        self.validity.watch(masters, sharded=self.group.size > 1)

    def _delayed_buffers(self) -> dict[str, dict[str, Tensor | None]]:
        """Return the buffers of the weights that are cast with delayed scaling, keyed by name."""
        return {
            self._names[i]: self.weights[i].state.buffers
            for i in self._cast_indices
            if self.weights[i].scale is not None
        }

    def _lay_out(self) -> None:
        """Derive from the partition all that a cast needs: the blocks that ranks share, the layout
        of all amaxes, and the tables of the memory that weights and masters are in now.
        """
        # All ranks build the plans of a group together, so their numbers agree.
        group_name = "" if self.group.handle is None else self.group.handle.group_name
        _built[group_name] += 1
        self._number = _built[group_name]
        shards, is_alone = self._partition.shards, self.group.size == 1
        cut = SplitBlocks.of(self._partition, self._cast_indices)
        layout = layout_of_plan(shards, self._cast_indices, cut, self._is_stepped, compares_calls=not is_alone)
        self.amaxes = PlanAmaxes(
            self._partition, self._cast_indices, cut, layout, self.group, self._names, self._raises_together
        )
        self._columnwise = ColumnwiseCopies(self.weights, self.backend, self.validity)
        self.delayed = DelayedScaling(self._delayed_buffers(), self._partition.device)
        cast = [(self._names[i], self.weights[i]) for i in self._cast_indices]
        has_codes = [name for name, w in cast if w.amax_history is not None and w.state.ever_cast]
        self.delayed.follow_codes(has_codes)
        self._bind()

    def _follow(self) -> None:
        """Wait for gathers, and make the tables again if a weight or a master has moved, or another
        plan has taken a weight over. Raises ValueError or TypeError, on this rank only, for masters
        that no plan could be built for.
        """
        for w in self.weights if self.validity.before_read else ():
            w.wait()
        if not all(map(operator.is_, map(_state_of, self.weights), self._states)):
            # `torch.utils.swap_tensors` has exchanged the storage of weights, and records nothing.
            self.validity.moved()
        if self._storage_version != self.validity.storage_version or self._tables.snapshot.has_moved():
            self._partition.check_again()
            if any(w.state.validity is not self.validity for w in self.weights):
                self._step_hooks.check_unclaimed()
            self._bind()

    def _take_weights(self) -> None:
        """Give the weights the validity of this plan in place of an earlier plan's validity."""
        with_master = set(self._cast_indices)
        for index, w in enumerate(self.weights):
            if w.state.validity is not self.validity:
                w.state.join(self.validity, has_master=index in with_master)

    def _bind(self) -> None:
        """Make the descriptor tables for the current memory. Local, and raises nothing."""
        self._take_weights()
        self._tables = CastTables.of(self._partition, self._cast_indices, self.amaxes, self._param_groups)
        self.delayed.bind(self._delayed_buffers())
        # The next cast compares these, to find out whether a weight has moved (`_follow`).
        self._storage_version = self.validity.storage_version
        self._states = list(map(_state_of, self.weights))


@dataclass(frozen=True)
class CastTables:
    """The tables of a cast, for the memory that weights and masters are in now.

    Attributes:
        owned: the weights that this rank computes scales of, with the elements that it owns.
        boundary: the elements of other ranks that this rank writes, since they share a byte with an
            own element.
        on_cpu: True if any masters are in CPU memory, and the weights on another device.
        stepped: those of `owned` whose masters an AdamUpdate steps.
        snapshot: the memory of the weights and masters of `owned`.
    """

    owned: list[WeightTable]
    boundary: list[WeightTable]
    on_cpu: bool
    stepped: list[WeightTable]
    snapshot: StorageSnapshot

    def check_update(self, update: AdamUpdate) -> None:
        """Raise ValueError or TypeError unless all masters that the update steps are views of one
        tensor, and its tensors reach as far as these masters do.
        """
        end = group_count = 0
        for table in self.stepped:
            masters = table.masters.tensors
            if len(masters) != 1 or table.key.master is not torch.float32:
                raise ValueError("an AdamUpdate needs masters that are views of one flat float32 tensor")
            end, group_count = max(end, table.end), max(group_count, table.group_count)
        if self.stepped:
            update.check(end, group_count, self.stepped[0].masters.tensors[0].device)

    @staticmethod
    def of(
        partition: Partition, indices: Sequence[int], amaxes: PlanAmaxes, param_groups: Sequence[int | None]
    ) -> "CastTables":
        """Make the tables of the weights at these `indices`. Local, and raises nothing."""
        device, backend = partition.device, partition.backend
        on_cpu = any(shard.on_cpu for shard in partition.shards)
        mirror = cpu_tensor(amaxes.buffer.numel() if on_cpu else 0, amaxes.buffer.dtype, device)
        of_device = WeightTables(device, backend)
        of_cpu = WeightTables(device, backend, lambda key, device: CpuTable(key, device, mirror))
        for index in indices:
            if index not in amaxes.offsets:
                continue  # Other ranks compute its scales.
            shard, group = partition.shards[index], param_groups[index]
            master = torch.float32 if shard.master is None else shard.master.dtype
            tables = of_cpu if shard.on_cpu else of_device
            table = tables.of(shard.weight, master, takes_updates=group is not None)
            shared, flag = amaxes.shared.get(index, -1), amaxes.flag_of.get(index, -1)
            table.add_shard(shard, amaxes.offsets[index], group or 0, shared, flag)
        boundary, elements = WeightTables(device, backend), amaxes.boundary
        if elements is not None:
            for index, element, slot in elements.others:
                shard = partition.shards[index]
                fmt, shape = shard.weight.format, shard.weight.shape
                _, (rows, columns) = shard.weight.stored_matrices
                number, position = divmod(element, rows * columns)
                matrix = shard.matrices()[number]
                table = boundary.of(shard.weight)
                row = table.add(matrix.weight, amax_offsets_of_matrix(fmt, shape, amaxes.offsets[index], number))
                table.set_span(row, matrix, Span(position, position + 1), elements.received[slot : slot + 1])
        owned = [*of_device.freeze(), *of_cpu.freeze()]
        stepped = [table for table in owned if table.key.takes_updates and table.masters.tensors]
        snapshot = StorageSnapshot.joined(table.snapshot for table in owned)
        return CastTables(owned, boundary.freeze(), on_cpu, stepped, snapshot)
