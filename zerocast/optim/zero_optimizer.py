"""ZeroOptimizer: FP32 master shards, whose weights are cast and gathered after each step.

One step, in order: reduce-scatter of gradients (started by backward hooks), norm, clip and a check
for non-finite values, the update of this rank's shard (for which gradients of matrices go to the
ranks that own them), cast, all-gather of bytes, columnwise copies. Only the device knows whether a
step is skipped, so the CPU never waits for it.
"""

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from zerocast import backends
from zerocast.cast.adam_update import Hyperparameters
from zerocast.cast.captured_step import CapturedStep, check_capturable
from zerocast.cast.host import CastDriver
from zerocast.cast.plan import CastPlan
from zerocast.cast.switch import SwitchPart
from zerocast.checkpoint.checkpointed import SavedMoments
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.bucket import Bucket, Layout, lay_out
from zerocast.distributed.group import Caller, Group, GroupLike
from zerocast.formats import FormatSpec
from zerocast.formats.shared_amax import SharedAmax
from zerocast.optim.bucket_bytes import BucketBytes
from zerocast.optim.config import ZeroConfig
from zerocast.optim.device_step import CapturableZeroStep, DeviceStep
from zerocast.optim.ema import Averages
from zerocast.optim.flat_masters import FlatMasters
from zerocast.optim.gradient_shard import shard_dtype
from zerocast.optim.gradients import GradientReducer
from zerocast.optim.muon_step import MuonStep
from zerocast.optim.norm import LogicalOrder, ParameterNorms
from zerocast.optim.reduced_gradient import take_off
from zerocast.optim.reduction_group import groups_free_on_all, is_shared_with_others, separate_group
from zerocast.optim.sharded_weights import ShardedWeights
from zerocast.optim.state import STATE_WRITTEN, StateByName, ZeroState
from zerocast.optim.step_counts import SkippedSteps, StepCounts
from zerocast.optim.untrained_checks import FrozenParameters, UntrainedTensors, frozen, listed
from zerocast.optim.update_rule import rule_of
from zerocast.optim.validate import (
    OTHER_GROUPS,
    TAKEN_OVER,
    Named,
    check_owners,
    describe,
    hyperparameters_by_name,
    listed_parameters,
    take_over,
    trainable,
    validated,
)
from zerocast.verification.master_views import MasterViews
from zerocast.verification.verify import verify
from zerocast.weight import QuantizedWeight
from zerocast.weight.owners import check_gradients
from zerocast.weight.validity import Use, debugging

logger = logging.getLogger(__name__)


class ZeroOptimizer(torch.optim.Optimizer):
    """FP32 masters in flat buckets, sharded over `group`. A subclass defines how they are updated.

    Args:
        params, group, stage, config: as in ZeroAdamW.
        defaults: hyperparameters of parameter groups that do not set them.
    """

    # The name of the class that users build, for messages.
    NAME: ClassVar[str]
    # The weights and their casts. Replaced when parameters are added.
    _weights: ShardedWeights
    _driver: CastDriver
    _plan: CastPlan

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], group: GroupLike, stage: int, config: ZeroConfig | None
    ) -> None:
        # True once all groups of the constructor are laid out.
        self._is_built = False
        self._config, self._stage = config or ZeroConfig(), stage
        self._caller = Caller(self.NAME)
        self._group = Group.of(group).called_by(self._caller)
        given: list[Any] = []
        named, settings, company, problem = [], {}, False, None
        try:
            given = listed(params)
            super().__init__(self._with_rules(trainable(given)), defaults)
            named = validated(self.param_groups, stage)
            self._check_parameters(named)
            check_owners(named, f"a {self.NAME}")
            backends.choose(named[0][1].device, self._config.backend)
            company = is_shared_with_others(self._group, [parameter for _, parameter, _ in named])
            settings = {"stage": stage, **vars(self._config), **hyperparameters_by_name(self.param_groups)}
        except (RuntimeError, TypeError, ValueError) as error:
            problem = error
        lines = [f"{name}: {describe(parameter)} in group {index}" for name, parameter, index in named]
        validate_across_ranks(self._group, lines, problem, f"builds a {self.NAME}", settings)
        self._frozen = FrozenParameters(frozen(given), self.NAME)
        self._untrained = UntrainedTensors(
            self._group, self._frozen.parameters, [parameter for _, parameter, _ in named]
        )
        free = groups_free_on_all(self._group, company)
        # The ranks of the reductions, for the life of the optimizer.
        self._reduction_group = self._group if free is None else separate_group(self._group, self, free)
        device = named[0][1].device
        # The trained parameters in the order in which they were given. More may be added.
        self._named: list[Named] = []
        self._layout = Layout([], [])
        self._masters = FlatMasters([], self._group, device, self._config.moment_dtype)
        self._counts = StepCounts(device)
        self._skipped_count = torch.zeros(1, dtype=torch.int64, device=device)
        self._reported = 0
        # The steps since the optimizer was built or has loaded a state.
        self._steps = 0
        # Captured steps, which follow changes of formats and parameters.
        self._captured: weakref.WeakSet[CapturedStep] = weakref.WeakSet()
        # The quantized weights whose masters began as the values of their codes, although an
        # earlier optimizer or plan had their FP32 values. Empty after the first step or load.
        self._begun_from_codes: list[str] = []
        self._build(named, *self._lay_out(named))
        self._caller.number = 1
        self._is_built = True

    def _with_rules(self, given: list[Any]) -> list[Any]:
        """Return the given pairs, or groups of them, as torch's constructor expects them. Raises
        ValueError for a group whose update is invalid.
        """
        raise NotImplementedError

    def _check_parameters(self, named: list[Named]) -> None:
        """Raise ValueError or TypeError for parameters that their group's update does not
        support.
        """

    def _costs(self, named: list[Named]) -> dict[str, int]:
        """Return the cost of the update of each parameter that one rank owns, keyed by name."""
        return {}

    def _described(self) -> str:
        """Describe the hyperparameters, besides Adam's, that must be equal on all ranks."""
        return ""

    def _adam_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups from which Adam's scalars are made. Raises ValueError or
        TypeError for values that have become invalid since the constructor checked them.
        """
        for group in self.param_groups:
            rule_of(group).check(group, wait=False)
        return self.param_groups

    def _lay_out(self, named: list[Named]) -> tuple[Layout, FlatMasters]:
        """Return the layout of all parameters and of these, and masters in it. Local. Changes
        nothing.
        """
        config, group = self._config, self._group
        added = lay_out(named, config.bucket_size, group.size, config.grad_dtype, self._costs(named))
        layout = self._layout.extended(added)
        device = self._masters.master.device
        return layout, FlatMasters(layout.buckets, group, device, config.moment_dtype, self._masters)

    def _build(self, named: list[Named], layout: Layout, masters: FlatMasters) -> None:
        """Train these parameters, too, with the results of `_lay_out`. Collective.

        All parts of the optimizer except its step counts are replaced. Existing buckets keep their
        shard boundaries and their bytes; the values of masters, moments and delayed scales are
        kept.
        """
        config, group, device = self._config, self._group, masters.master.device
        self._begun_from_codes += [name for name, parameter, _ in named if _was_trained(parameter)]
        masters.initialise()
        for _, parameter, _ in named:
            take_off(parameter)
            if isinstance(parameter, QuantizedWeight) and config.grad_dtype is torch.float32:
                # The weight gradient is computed in it.
                parameter.grad_dtype = torch.float32
        older = self._layout.buckets
        self._layout, self._masters = layout, masters
        self._named += named
        names = [name for name, _, _ in self._named]
        self._counts.add_groups(len(self.param_groups) - len(self._counts.before))
        self._claim = take_over(self._named, f"a {self.NAME}")
        self._place_weights(older)
        order = LogicalOrder(layout.gradients, names, group, device) if config.deterministic else None
        norms = ParameterNorms(layout.gradients, self._reduction_group, order, device)
        dtype = shard_dtype(layout, config)
        self._reducer = GradientReducer(
            layout.gradients,
            self._reduction_group,
            self._stage,
            config,
            device,
            norms,
            dtype,
            self._plan.check_before_collective,
        )
        self._hyperparameters = Hyperparameters(len(self.param_groups), device)
        muon = None
        if any(bucket.storage.single_owner for bucket in layout.buckets):
            muon = MuonStep(layout, self._masters, self.param_groups, group, config.bucket_size)
        shard = self._reducer.gradients
        self._device = DeviceStep(
            shard, self._masters, self._hyperparameters, order, group, muon, self._counts, self._skipped_count
        )
        self._reducer.gradients.apply_clip = self._device.apply_clip
        self._skipped = SkippedSteps(self._counts.taken, group)
        # The norm to which gradients were clipped since the last step, as a text that ranks
        # compare.
        self._clipped = ""
        # The last sum of squares, with the version of the gradients at that time.
        self._square_sum: tuple[int, Tensor] | None = None
        is_compact = config.state == "compact"
        self._state = ZeroState(
            layout.buckets, self._masters, self._plan, self._counts, self.param_groups, group, is_compact
        )
        self.state = StateByName(self._state.moments_of)
        self._validity = self._plan.validity
        self._validity.owner = weakref.ref(self)
        # The claim lists the trained parameters, so other objects over the same weights are not
        # trained.
        self._validity.has_masters = False
        self.averages = Averages(self._masters.master, self._counts.taken, self._state, self._driver, self._reducer)
        self._register_prechecks()
        self._driver.refresh()
        # Comes last: steps raise as long as it differs from `param_groups`.
        self._listed = listed_parameters(self.param_groups)

    def _place_weights(self, older: Sequence[Bucket]) -> None:
        """Place the weights of all buckets after the `older` ones, whose bytes stay, in flat
        buffers, and prepare the casts of all weights. Collective.
        """
        buckets, device = self._layout.buckets, self._masters.master.device
        placed: list[BucketBytes] = []
        delayed: dict[str, dict[str, Tensor]] = {}
        if older:
            placed, delayed = self._weights.buffers, self._plan.delayed.state_dict()
        starts = {before.start: now.start for before, now in zip(older, buckets, strict=False)}
        for buffer in placed:
            # After a switch of formats several buffers may have parts of one bucket.
            buffer.move_to(starts[buffer.bucket.start])
        added = [BucketBytes(bucket, device) for bucket in buckets[len(older) :]]
        self._weights = ShardedWeights([*placed, *added], self._masters, self._group, self._config, self._claim)
        self._driver = self._weights.driver
        self._plan = self._driver.plan
        if delayed:
            self._plan.delayed.load_state_dict({**self._plan.delayed.state_dict(), **delayed})

    def _register_prechecks(self) -> None:
        """Register the checks of this optimizer that run before its weights are used
        (`Validity.add_precheck`).
        """
        add_precheck = self._validity.add_precheck
        add_precheck(self._check_parameters_are_ours, Use.REDUCE, Use.STEP, Use.SWITCH, Use.ADD, Use.SWAP, Use.LOAD)
        add_precheck(self.averages.check_not_swapped, Use.STEP, Use.SAVE, Use.SWITCH, Use.ADD, Use.SWAP, Use.LOAD)
        add_precheck(self._check_unwritten, Use.SAVE)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update masters, moments and weights once. A non-finite gradient anywhere skips it on
        every rank, nothing changed.

        Consumes the gradients: the next backward pass starts from zero. The gradient of a parameter
        whose `grad` is None counts as zero. Returns the result of `closure`, or None. An exception
        before masters are written (an unreduced gradient, out of memory) changes nothing: call
        `zero_grad()` and continue. After a later exception every call raises until a state is
        loaded.
        """
        # A graph would hold neither the hooks of gradients nor the CPU's part of a cast.
        step = self._step_between_graphs if torch.compiler.is_compiling() else self._step
        return step(closure)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _step_between_graphs(self, closure: Callable[[], Any] | None) -> Any:
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()
        square_sum = self._reduced_square_sum()
        launch = functools.partial(self._device.launch, self._plan, square_sum)
        self._driver.step(launch, self._device.step_collectives)
        self._finish()
        return loss

    @torch.no_grad()
    def capture(self, max_norm: float | None = None) -> CapturedStep:
        """Capture `clip_grad_norm_(max_norm)` and `step()` as one CUDA graph. Call the result in
        place of the two.

        Collective, before or between steps; it changes nothing. Loops, schedulers, loading of
        states and ordinary steps in between stay as they are: learning rates, tensors or numbers,
        are read at every call. A graph cannot hold backward passes with their reductions, closures
        and step hooks. Raises RuntimeError for parameters that are not on a CUDA device, and for
        the reference backend.
        """
        self._validity.check(Use.STEP)
        check_capturable(self._masters.master.device, self._plan.backend)
        prepare = functools.partial(self._prepare_captured, max_norm)
        step = CapturedStep(CapturableZeroStep(self._parts, prepare, self._finish, max_norm))
        self._captured.add(step)
        return step

    def _parts(self) -> tuple[DeviceStep, ShardedWeights]:
        return self._device, self._weights

    def _prepare(self, clipped: str = "") -> None:
        """Do the CPU's part of a step before the device's. Raises with nothing changed.

        It reduces gradients, reads hyperparameters and finds where the weights are. `clipped`
        describes the norm to which a graph clips. Errors that may occur on this rank only
        (parameter groups, hyperparameters, averages) are raised on all ranks by the cast
        (`Plan.ready`).
        """
        # These errors are the same on all ranks, or were raised before.
        self._validity.check(Use.STEP)
        self._plan.check_before_collective()
        self._skipped.before_step()
        # Before other collectives, since other ranks reduce in their backward pass, and a rank
        # without any gradient here.
        self._reducer.finish()
        self._untrained.after_steps(self._steps)
        if self._begun_from_codes:
            self._warn_of_codes()
        averaged, problem = "", None
        try:
            self._check_parameters_are_listed()
            averaged = self.averages.before_step()
            self._hyperparameters.refresh(self._adam_groups())
        except (RuntimeError, TypeError, ValueError) as error:
            problem = error
        changes = self._reducer.gradients.changes
        changed = f", after {changes} changes of gradients," if changes else ""
        same = f"{problem or self._hyperparameters.description}{self._described()}{averaged}"
        self._driver.ready(f"{clipped or self._clipped}{changed} with {same}", problem)
        if debugging():
            self._reducer.check_same_call(f"steps with {hyperparameters_by_name(self.param_groups)}")

    def _warn_of_codes(self) -> None:
        """Warn before the first step if FP32 masters of an earlier optimizer were left behind."""
        if self._group.rank == 0:
            logger.warning(
                "the masters of %d quantized weights of a %s, the first is %s, began as the values of their codes, without the "
                "FP32 values that an earlier optimizer or plan had: load its state before the first step, or use that optimizer",
                len(self._begun_from_codes),
                self.NAME,
                self._begun_from_codes[0],
            )
        self._begun_from_codes.clear()

    def _check_parameters_are_ours(self, use: Use) -> None:
        """Raise RuntimeError if a newer optimizer has taken a parameter over."""
        if self._claim.ended:
            raise RuntimeError(TAKEN_OVER)

    def _check_parameters_are_listed(self) -> None:
        """Raise RuntimeError, on this rank only, for parameters with gradients that would not be
        trained, and for parameter groups that changed after masters were laid out.
        """
        check_gradients()
        self._frozen.check_still_frozen()
        if not isinstance(self.state, StateByName):
            raise RuntimeError(STATE_WRITTEN.format("optimizer.state = ..."))
        if listed_parameters(self.param_groups) != self._listed:
            raise RuntimeError(OTHER_GROUPS.format(name=self.NAME))

    def _check_unwritten(self, use: Use) -> None:
        """Raise RuntimeError for parameters that other code has written: masters do not have these
        values. A step checks this separately.

        An optimizer that was taken over can be saved, for the newer one to load, until that one has
        changed the parameters.
        """
        try:
            self._weights.gather.check()
        except RuntimeError as error:
            if self._claim.ended:
                raise RuntimeError(TAKEN_OVER) from error
            raise

    def _prepare_captured(self, max_norm: float | None) -> None:
        """Prepare a captured step. A graph that clips overwrites the factor of an earlier clip."""
        self._prepare("" if max_norm is None else f", clipped to {max_norm:.6g}")
        if max_norm is not None:
            self._apply_clip()

    def _finish(self) -> None:
        """Do the CPU's part of a step after the device's: drop the gradients, and verify all live
        bytes after every `verify_every` steps.
        """
        # Averages are updated on the device. If that raises, the step is only partly done.
        with self._plan.validity.transaction("an optimizer step"):
            self.averages.after_step()
            self._skipped.after_step()
        self._validity.changed()
        self._square_sum, self._clipped, self._device.clipped = None, "", False
        self._caller.number += 1
        self._reducer.reset()
        # torch's schedulers check this flag, which otherwise only a call of `step` sets.
        self._opt_called = True
        self._steps += 1
        if self._config.verify_every and self._steps % self._config.verify_every == 0:
            verify(self).raise_for_differences()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the coming step's gradients so that their global norm is at most `max_norm`;
        returns the norm before, f32[].

        The norm is computed over the averaged gradients of all ranks. As in torch, the factor is
        `max_norm / (norm + 1e-6)`, at most 1. `torch.nn.utils.clip_grad_norm_` does the same, but
        launches a kernel for each gradient, while this one scales in the update.
        """
        self._validity.check(Use.REDUCE)
        self._reducer.finish()
        self._reducer.check_same_call(f"clips gradients to {max_norm}")
        self._apply_clip()
        norm = self._reduced_square_sum().sqrt().float()
        self._device.clip_to(max_norm, norm)
        self._clipped = f", clipped to {max_norm:.6g}"
        self._device.clipped = True
        self._reducer.mark_modified()
        return norm

    def _apply_clip(self) -> None:
        """Apply a clip that is due; the gradients then have the norm they were clipped to."""
        if self._device.apply_clip():
            self._reducer.gradients.mark_all_changed()

    def _reduced_square_sum(self) -> Tensor:
        """Return the sum of squares of the averaged gradient, f64[], the same on every rank."""
        version = self._reducer.gradients.version
        if self._square_sum is None or self._square_sum[0] != version:
            self._square_sum = version, self._device.square_sum()
        return self._square_sum[1]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, reduced or not."""
        self._device.clip.fill_(1.0)
        self._clipped, self._device.clipped = "", False
        self._reducer.reset()
        # A weight's __torch_function__ would otherwise run at every access of a gradient.
        with torch._C.DisableTorchFunctionSubclass():
            super().zero_grad(set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only while the context is open. The next backward pass
        outside of it reduces the sum.
        """
        before = self._reducer.set_synchronise(synchronise=False)
        try:
            yield
        finally:
            self._reducer.set_synchronise(synchronise=before)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group that the masters are sharded over; None for one process without a group."""
        return self._group.handle

    def master_views(self) -> tuple[MasterViews, ...]:
        """Return the masters of all parameters, for `zerocast.verify`."""
        return tuple(self._driver.master_views())

    def switch_part(self) -> SwitchPart:
        """Return the part of this optimizer in `zerocast.switch`, which is called between `step()`
        and a backward pass.
        """
        return SwitchPart(
            groups=(self._group,),
            weights=self._weights.shapes(),
            plain=self._weights.plain_matrices(),
            check=lambda formats: self._check_between_steps(Use.SWITCH),
            convert=self._weights.convert,
            recast=self._recast_switched,
            held=[self._weights, self._driver, *self._plan.held],
        )

    def _check_between_steps(self, use: Use) -> None:
        """Raise RuntimeError, on this rank only, if formats or parameters cannot change now."""
        self._plan.check_between_steps(use)
        self._reducer.check_used_up(use)
        self._weights.gather.prepare()

    def _recast_switched(self, formats: Mapping[str, FormatSpec]) -> None:
        self._weights.rebuild(formats)
        self._record_again()

    def _record_again(self) -> None:
        for step in self._captured:
            step.capture()

    @property
    def formats(self) -> dict[str, tuple[FormatSpec, torch.dtype]]:
        """Format and nominal dtype of each quantized weight keyed by name."""
        return self._weights.formats()

    @property
    def shared_amaxes(self) -> dict[str, SharedAmax]:
        """The weights that share a tensor amax, by the name of each."""
        return self._weights.shared_amaxes()

    @property
    def skipped_steps(self) -> int:
        """The number of steps that a non-finite gradient has skipped. Reading it waits for the
        device, and logs new skipped steps.
        """
        count = int(self._skipped_count)
        if count > self._reported and self._group.rank == 0:
            logger.warning("%d steps skipped for non-finite gradients, %d in all", count - self._reported, count)
        self._reported = count
        return count

    @property
    def frozen(self) -> Mapping[str, Tensor]:
        """The parameters that were frozen when the optimizer got them, keyed by name."""
        return self._frozen.parameters

    @property
    def model(self) -> None:
        """None, since the optimizer is built from parameters and does not know their model.
        Checkpoints read this.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return masters, moments, step, hyperparameters and delayed scales keyed by parameter name
        (`zerocast.optim.state`). Tensors are views that the next step changes.

        Save it with torch.distributed.checkpoint, which then loads in place, or on one rank with
        torch.save. Raises RuntimeError after a step that failed partway, whose masters and moments
        belong to different steps, and if other code has written parameters, since masters do not
        have these values.
        """
        self._validity.check(Use.SAVE)
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state = self._state.as_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state)
            state = state if replaced is None else replaced
        return state

    def state_to_overwrite(self, kept: SavedMoments | None = None) -> dict[str, Any]:
        """Return the keys and shapes of `state_dict`, for a reader that fills them, also after a
        step that failed partway. `kept` tells what the reader has of the moments of each
        parameter.
        """
        return self._state.as_dict(kept)

    def check_numbers(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError, on this rank only, for invalid step counts and hyperparameters."""
        self._state.check_numbers(state_dict)

    @contextlib.contextmanager
    def overwriting(self) -> Iterator[None]:
        """Overwrite the state while the context is open. After an exception in it the optimizer
        must load a state before it continues.
        """
        self._validity.check(Use.LOAD)
        # True if a reader of checkpoints has opened this context around `load_state_dict`.
        nested = self._validity.is_writing
        if self._validity.partial:
            self.zero_grad()
        if not nested:
            self._plan.forget_call()
        with self._plan.validity.transaction("loading a checkpoint"):
            yield
        self._validity.changed()
        if not nested:
            self.averages.masters_loaded()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of the same parameters, saved by any number of ranks, and cast the weights
        from its masters.

        Raises ValueError, with nothing changed, if names are missing or shapes differ. After a step
        that failed partway the optimizer is valid again; the gradients of that step are dropped.
        """
        self._validity.check(Use.LOAD)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, dict(state_dict))
            state_dict = state_dict if replaced is None else replaced
        self._state.check(state_dict)
        before = self._counts.before
        with self.overwriting():
            self._state.load(state_dict)
            taken = int(self._counts.taken)
            self._caller.number = taken + 1
            self._skipped.restart(taken)
            # On a GPU some ranks may have finished a step that others could not make.
            self._steps = 0
            self._begun_from_codes.clear()
            self._driver.refresh()
        if self._counts.before != before:
            # Graphs hold keys of random numbers, which depend on these counts.
            self._record_again()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Raise TypeError: shards, hooks and process groups cannot be copied; `state_dict` can."""
        raise TypeError(f"a {self.NAME} cannot be copied or pickled: build another one and load the state of this one")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train the parameters of another group, too. Collective, between two steps.

        `param_group` is one that the constructor takes, with (name, parameter) pairs. Its
        parameters get separate buckets, masters and moments, and the group's count of steps begins
        at zero, as in torch.optim.AdamW; checkpoints hold it. Averages start at the masters of the
        added parameters, and captured steps are recorded again. Schedulers know the groups that
        they were built for: build another one. During the call, memory for two copies of the
        masters and moments is needed.

        Raises on every rank, with nothing changed, for groups that the constructor would reject or
        that differ between ranks. Raises RuntimeError between a backward pass and the step or
        `zero_grad` after it, or while an average is swapped in.
        """
        if not self._is_built:
            super().add_param_group(param_group)
            return
        count = len(self.param_groups)
        given, named, problem = [], [], None
        try:
            self._check_between_steps(Use.ADD)
            given = listed([param_group])
            (group,) = self._with_rules(trainable(given))
            super().add_param_group(group)
            named = [each for each in validated(self.param_groups, self._stage) if each[2] == count]
            self._check_parameters(named)
            check_owners(named, f"a {self.NAME}")
            parts = self._lay_out(named)
        except (RuntimeError, TypeError, ValueError) as error:
            problem = error
        lines = [f"{name}: {describe(parameter)}" for name, parameter, _ in named]
        settings = {} if problem else hyperparameters_by_name(self.param_groups)
        try:
            validate_across_ranks(self._group, lines, problem, f"adds parameters to a {self.NAME}", settings)
        except BaseException:
            del self.param_groups[count:]
            raise
        masters, averages = self._masters, self.averages
        self._build(named, *parts)
        self._skipped.restart(int(self._counts.taken))
        trained = [parameter for _, parameter, _ in self._named]
        self._frozen.add(frozen(given), trained)
        self._untrained.add(frozen(given), trained)
        averages.move_to(self.averages, lambda flat: self._masters.completed(flat, masters))
        self._record_again()


def _was_trained(parameter: Tensor) -> bool:
    """Return True for a quantized weight that was cast from masters, which it does not have any
    more.
    """
    if not isinstance(parameter, QuantizedWeight) or parameter.high_precision_init_val is not None:
        return False
    return parameter.state.has_master and parameter.state.validity.casts > 0
