"""ZeroOptimizer: FP32 master shards, whose weights are cast and gathered after each step.

A step, in order:

1. Reduce-scatter gradients. Backward hooks have started this.
2. Compute the norm, clip, and look for non-finite values.
3. Update this rank's shard. For Muon, gradients of matrices first go to the ranks that own them.
4. Cast the masters, all-gather the bytes, and make columnwise copies.

Only the device knows whether a non-finite gradient skips the step, so the CPU never waits for that.
"""

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from zerocast import backends
from zerocast.cast.adam_update import Hyperparameters
from zerocast.cast.captured_step import CapturedStep, check_capturable
from zerocast.cast.switch import SwitchPart
from zerocast.checkpoint.checkpointed import SavedMoments
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.bucket import Layout, lay_out
from zerocast.distributed.group import Caller, Group, GroupLike
from zerocast.formats import FormatSpec
from zerocast.formats.shared_amax import SharedAmax
from zerocast.optim.bucket_bytes import BucketBytes
from zerocast.optim.config import (
    OTHER_GROUPS,
    TAKEN_OVER,
    Named,
    ZeroConfig,
    check_owners,
    describe,
    hyperparameters_by_name,
    listed_parameters,
    take_over,
    trainable,
    validated,
)
from zerocast.optim.device_step import CapturableZeroStep, DeviceStep
from zerocast.optim.ema import Averages
from zerocast.optim.flat_masters import FlatMasters
from zerocast.optim.gradient_shard import shard_dtype
from zerocast.optim.gradients import GradientReducer
from zerocast.optim.muon_step import MuonStep
from zerocast.optim.norm import GradientNorms, LibraryOrder, LogicalOrder
from zerocast.optim.reduced_gradient import remove_reduced_gradient
from zerocast.optim.reduction_group import groups_free_on_all, is_shared_with_others, separate_group
from zerocast.optim.sharded_weights import ShardedWeights
from zerocast.optim.state import STATE_WRITTEN, StateByName, ZeroState
from zerocast.optim.step_counts import SkippedSteps, StepCounts
from zerocast.optim.untrained_checks import FrozenParameters, UntrainedTensors, frozen, listed
from zerocast.optim.update_rule import rule_of
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

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], group: GroupLike, stage: int, config: ZeroConfig | None
    ) -> None:
        # False until the constructor has laid out its groups. torch's constructor calls
        # `add_param_group` for each of them.
        self._is_built = False
        self._config = config or ZeroConfig()
        self._stage = stage
        self._caller = Caller(self.NAME)
        self._group = Group.of(group).called_by(self._caller)
        # Errors are collected here and raised by `validate_across_ranks`, on all ranks.
        problem: Exception | None = None
        given: list[Any] = []
        named: list[Named] = []
        settings: dict[str, object] = {}
        shares_group = False
        try:
            given = listed(params)
            super().__init__(self._with_rules(trainable(given)), defaults)
            named = validated(self.param_groups, stage)
            self._check_parameters(named)
            check_owners(named, f"a {self.NAME}")
            backends.choose(named[0][1].device, self._config.backend)
            shares_group = is_shared_with_others(self._group, [parameter for _, parameter, _ in named])
            settings = {"stage": stage, **vars(self._config), **hyperparameters_by_name(self.param_groups)}
        except (RuntimeError, TypeError, ValueError) as error:
            problem = error
        lines = [f"{name}: {describe(parameter)} in group {index}" for name, parameter, index in named]
        validate_across_ranks(self._group, lines, problem, f"builds a {self.NAME}", settings)
        self._frozen = FrozenParameters(frozen(given), self.NAME)
        self._untrained = UntrainedTensors(
            self._group, self._frozen.parameters, [parameter for _, parameter, _ in named]
        )
        free_groups = groups_free_on_all(self._group, shares_group)
        # The process group of gradient reductions, separate from `_group` if another optimizer
        # reduces over that too. For the life of the optimizer.
        self._reduction_group = self._group if free_groups is None else separate_group(self._group, self, free_groups)
        device = named[0][1].device
        # The trained parameters in the order in which they were given. `add_param_group` adds more,
        # and replaces the layout and the masters.
        self._named: list[Named] = []
        self._layout = Layout([], [])
        self._masters = FlatMasters([], self._group, device, self._config.moment_dtype)
        # The numbers of steps, for the life of the optimizer: of each parameter group, all skipped
        # ones (on the device), and the skipped ones that were logged.
        self._counts = StepCounts(device)
        self._skipped_count = torch.zeros(1, dtype=torch.int64, device=device)
        self._logged_skipped = 0
        # The number of steps since the optimizer was built or has last loaded a state.
        self._steps = 0
        # The living captured steps. A change of formats or parameters records them again.
        self._captured: weakref.WeakSet[CapturedStep] = weakref.WeakSet()
        # The quantized weights whose masters were initialised from their codes, although an earlier
        # optimizer or plan had FP32 values of them. Empty after the first step or load.
        self._initialised_from_codes: list[str] = []
        self._build(named, *self._lay_out(named))
        self._caller.number = 1
        self._is_built = True

    def _with_rules(self, given: list[Any]) -> list[Any]:
        """Return the given (name, parameter) pairs, or groups of them, as torch's constructor
        expects them. Raises ValueError for a group whose update rule is invalid.
        """
        raise NotImplementedError

    def _check_parameters(self, named: list[Named]) -> None:
        """Raise ValueError or TypeError for parameters that the update rule of their group does not
        support.
        """

    def _costs(self, named: list[Named]) -> dict[str, int]:
        """Return the cost of an update, keyed by name, for each parameter that a single rank
        owns.
        """
        return {}

    def _other_hyperparameters(self) -> str:
        """Return the hyperparameters other than Adam's as a text that ranks compare."""
        return ""

    def _adam_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups from which Adam's scalars are made. Raises ValueError or
        TypeError for values that have become invalid since the constructor checked them.
        """
        for group in self.param_groups:
            rule_of(group).check(group, wait=False)
        return self.param_groups

    def _lay_out(self, named: list[Named]) -> tuple[Layout, FlatMasters]:
        """Return the layout of the current parameters and the `named` ones together, and masters
        in that layout. Local. Changes nothing.
        """
        config, group = self._config, self._group
        added = lay_out(named, config.bucket_size, group.size, config.grad_dtype, self._costs(named))
        layout = self._layout.extended(added)
        device = self._masters.master.device
        return layout, FlatMasters(layout.buckets, group, device, config.moment_dtype, self._masters)

    def _build(self, named: list[Named], layout: Layout, masters: FlatMasters) -> None:
        """Build all parts of the optimizer except its step counts, for the current parameters and
        the `named` ones. `layout` and `masters` are the result of `_lay_out`. Collective.

        Existing buckets keep their shard boundaries and their bytes. The values of masters, moments
        and delayed scales are kept.
        """
        config, group, device = self._config, self._group, masters.master.device
        # The parts below hold the current tensors of the counts.
        self._counts.add_groups(len(self.param_groups) - len(self._counts.before))
        # Masters take their values from the parameters before those are placed in flat buffers.
        self._take_parameters(named, masters)
        weights = self._place_weights(layout, masters)
        plan = weights.driver.plan
        order: LibraryOrder | LogicalOrder = LibraryOrder(group)
        if config.deterministic:
            order = LogicalOrder(layout.gradients, [name for name, _, _ in self._named], group, device)
        reducer = GradientReducer(
            layout.gradients,
            self._reduction_group,
            self._stage,
            config,
            device,
            GradientNorms(layout.gradients, self._reduction_group, order, device),
            shard_dtype(layout, config),
            plan.check_before_collective,
        )
        muon = None
        if any(bucket.storage.single_owner for bucket in layout.buckets):
            muon = MuonStep(layout, masters, self.param_groups, group, config.bucket_size)
        hyperparameters = Hyperparameters(len(self.param_groups), device)
        device_step = DeviceStep(reducer.gradients, masters, hyperparameters, muon, self._counts, self._skipped_count)
        reducer.gradients.apply_clip = device_step.apply_clip
        is_compact = config.state == "compact"
        state = ZeroState(layout.buckets, masters, plan, self._counts, self.param_groups, group, is_compact)

        # These attributes live until parameters are added.
        self._layout = layout
        self._masters = masters
        self._weights = weights
        self._driver = weights.driver
        self._plan = plan
        self._validity = plan.validity
        self._reducer = reducer
        self._hyperparameters = hyperparameters
        self._device = device_step
        self._skipped = SkippedSteps(self._counts.taken, group)
        self._state = state
        self.state = StateByName(state.moments_of)
        self.averages = Averages(masters.master, self._counts.taken, state, weights.driver, reducer)
        # The norm to which gradients were clipped since the last step, as a text that ranks
        # compare. Empty if they were not clipped.
        self._clipped = ""
        # The sum of squares of the gradients, with the version of the gradients that it is of. None
        # from a step until the sum is first needed.
        self._square_sum: tuple[int, Tensor] | None = None

        self._register_prechecks()
        version = self._validity.version
        self._driver.refresh()
        # This repeats the bytes, unless ranks begin from initial values of rank 0.
        if group.size == 1 or self._is_built or self._initialised_from_codes:
            self._validity.version = version
        # Set last. Steps raise as long as it differs from `param_groups`.
        self._listed = listed_parameters(self.param_groups)

    def _take_parameters(self, named: list[Named], masters: FlatMasters) -> None:
        """Take over the values of the `named` parameters, and claim them. Collective."""
        self._initialised_from_codes += [name for name, parameter, _ in named if _has_lost_masters(parameter)]
        masters.initialise()
        for _, parameter, _ in named:
            remove_reduced_gradient(parameter)
            if isinstance(parameter, QuantizedWeight) and self._config.grad_dtype is torch.float32:
                # Backward passes then compute the weight gradient in FP32.
                parameter.grad_dtype = torch.float32
        self._named += named
        self._claim = take_over(self._named, f"a {self.NAME}")

    def _place_weights(self, layout: Layout, masters: FlatMasters) -> ShardedWeights:
        """Place the weights of new buckets in flat buffers, and prepare the casts of all weights.
        Current buckets come first in `layout`, and their flat buffers stay. Collective.
        """
        old_buckets = self._layout.buckets
        old_buffers: list[BucketBytes] = []
        delayed: dict[str, dict[str, Tensor]] = {}
        if old_buckets:
            old_buffers = self._weights.buffers
            delayed = self._plan.delayed.state_dict()
        # Where the shard of an old bucket begins in the masters, before and now.
        new_starts = {old.start: new.start for old, new in zip(old_buckets, layout.buckets, strict=False)}
        for buffer in old_buffers:
            # After a switch of formats several buffers may belong to one bucket.
            buffer.move_to(new_starts[buffer.bucket.start])
        new_buffers = [BucketBytes(bucket, masters.master.device) for bucket in layout.buckets[len(old_buckets) :]]
        weights = ShardedWeights([*old_buffers, *new_buffers], masters, self._group, self._config, self._claim)
        plan = weights.driver.plan
        if delayed:
            plan.delayed.load_state_dict({**plan.delayed.state_dict(), **delayed})
        plan.validity.owner = weakref.ref(self)
        # The claim lists the trained parameters, so other objects over the same weights are not
        # trained.
        plan.validity.has_masters = False
        return weights

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
        """Update masters, moments and weights once. Returns the result of `closure`, or None.

        If a gradient on any rank is not finite, all ranks skip the step, and nothing changes.

        The step consumes the gradients: the next backward pass starts from zero. The gradient of a
        parameter whose `grad` is None counts as zero.

        An exception before masters are written (an unreduced gradient, out of memory) changes
        nothing: call `zero_grad()` and continue. After a later exception every call raises until a
        state is loaded.
        """
        # torch.compile would put neither the hooks of gradients nor the CPU's part of a cast into
        # its graph.
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
        self._driver.step(launch, self._device.step_collectives, self._end_step)
        if self._config.verify_every:
            self._verify_every(self._config.verify_every)
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
        describes the norm to which a captured graph is going to clip. Errors that may occur on this
        rank only (parameter groups, hyperparameters, averages) are passed to the cast, which raises
        them on all ranks (`Plan.ready`).
        """
        # These two raise on all ranks or on none.
        self._validity.check(Use.STEP)
        self._plan.check_before_collective()
        self._skipped.before_step()
        # This comes before other collectives. A rank without any gradient runs here the reductions
        # that other ranks have run in their backward pass.
        self._reducer.finish()
        self._untrained.after_steps(self._steps)
        if self._initialised_from_codes:
            self._warn_of_lost_masters()
        averaged, problem = "", None
        try:
            self._check_parameters_are_listed()
            averaged = self.averages.before_step()
            self._hyperparameters.refresh(self._adam_groups())
        except (RuntimeError, TypeError, ValueError) as error:
            problem = error
        changes = self._reducer.gradients.changes
        changed = f", after {changes} changes of gradients," if changes else ""
        settings = f"{problem or self._hyperparameters.description}{self._other_hyperparameters()}{averaged}"
        # Ranks compare this text. They must clip, change gradients and update alike.
        self._driver.ready(f"{clipped or self._clipped}{changed} with {settings}", problem)
        if debugging():
            self._reducer.check_same_call(f"steps with {hyperparameters_by_name(self.param_groups)}")

    def _warn_of_lost_masters(self) -> None:
        """Warn, before the first step, that FP32 masters of an earlier optimizer were not used."""
        if self._group.rank == 0:
            logger.warning(
                "the masters of %d quantized weights of a %s, the first is %s, began as the values of the codes. An "
                "earlier optimizer or plan had FP32 values: load its state before the first step, or use that optimizer",
                len(self._initialised_from_codes),
                self.NAME,
                self._initialised_from_codes[0],
            )
        self._initialised_from_codes.clear()

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
        """Raise RuntimeError if other code has written parameters, since masters do not have these
        values. A step checks this separately.

        An optimizer that was taken over can still be saved, for the newer one to load, until that
        one has changed the parameters.
        """
        try:
            self._weights.gather.check()
        except RuntimeError as error:
            if self._claim.ended:
                raise RuntimeError(TAKEN_OVER) from error
            raise

    def _prepare_captured(self, max_norm: float | None) -> None:
        """Do the CPU's part of a captured step before the device's."""
        self._prepare("" if max_norm is None else f", clipped to {max_norm:.6g}")
        if max_norm is not None:
            # The graph overwrites the factor of an earlier clip, so that must be applied before.
            self._apply_clip()

    def _finish(self) -> None:
        """Do the CPU's part of a step whose device part was replayed."""
        self._end_step()
        if self._config.verify_every:
            self._verify_every(self._config.verify_every)

    def _end_step(self) -> None:
        """Do the CPU's part of a step after the device's. An exception leaves the step partial: the
        averages may lack it, and a call that repeats it would step with the same gradients.
        """
        with self._plan.validity.transaction("an optimizer step"):
            self.averages.after_step()
            self._skipped.after_step()
            self._validity.changed()
            self._square_sum = None
            self._clipped = ""
            self._device.clipped = False
            self._caller.number += 1
            self._reducer.reset()
            # torch's schedulers check this flag, which otherwise only a call of `step` sets.
            self._opt_called = True
            self._steps += 1

    def _verify_every(self, steps: int) -> None:
        """Verify all live bytes if this step is the last of `steps`."""
        if self._steps % steps == 0:
            verify(self).raise_for_differences()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of the next step so that their global norm is at most `max_norm`.
        Returns the norm before scaling, f32[].

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
        """Multiply the gradients by the factor of an earlier clip, if it is not applied yet."""
        if self._device.apply_clip():
            self._reducer.gradients.mark_all_changed()

    def _reduced_square_sum(self) -> Tensor:
        """Return the sum of squares of the averaged gradient, f64[], the same on every rank."""
        gradients = self._reducer.gradients
        version = gradients.version
        if self._square_sum is None or self._square_sum[0] != version:
            self._square_sum = version, gradients.norms.square_sum(gradients.flat, begun=True)
        return self._square_sum[1]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, reduced or not."""
        self._device.clip.fill_(1.0)
        self._clipped = ""
        self._device.clipped = False
        self._reducer.reset()
        # Otherwise each access of a gradient would run the weight's __torch_function__.
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
            changed_by_switch=[self._weights, self._driver, *self._plan.changed_by_switch],
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
        """The weights that share a tensor amax, keyed by the name of each of them."""
        return self._weights.shared_amaxes()

    @property
    def skipped_steps(self) -> int:
        """The number of steps that a non-finite gradient has skipped. Reading it waits for the
        device, and logs new skipped steps.
        """
        count = int(self._skipped_count)
        new = count - self._logged_skipped
        if new > 0 and self._group.rank == 0:
            logger.warning("%d steps skipped for non-finite gradients, %d in all", new, count)
        self._logged_skipped = count
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
        """Return tensors with the keys and shapes of `state_dict`, for a reader that overwrites
        them. Unlike `state_dict`, this works after a step that failed partway. `kept` describes the
        moments that the reader has of each parameter.
        """
        return self._state.as_dict(kept)

    def check_numbers(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError, on this rank only, for invalid step counts and hyperparameters."""
        self._state.check_numbers(state_dict)

    @contextlib.contextmanager
    def overwriting(self) -> Iterator[None]:
        """Return a context in which the caller overwrites the state. After an exception in it the
        optimizer must load a state before it continues.
        """
        self._validity.check(Use.LOAD)
        # True if a checkpoint reader has opened this context and calls `load_state_dict` in it.
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
            # Some ranks may have finished a step that others could not make. Counting from 0 makes
            # the counts of all ranks equal.
            self._steps = 0
            self._initialised_from_codes.clear()
            self._driver.refresh()
        if self._counts.before != before:
            # Graphs contain keys of random numbers, which depend on these counts.
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
        old_count = len(self.param_groups)
        problem: Exception | None = None
        given: list[Any] = []
        named: list[Named] = []
        try:
            self._check_between_steps(Use.ADD)
            given = listed([param_group])
            (group,) = self._with_rules(trainable(given))
            super().add_param_group(group)
            new_index = old_count
            named = [entry for entry in validated(self.param_groups, self._stage) if entry[2] == new_index]
            self._check_parameters(named)
            check_owners(named, f"a {self.NAME}")
            layout, masters = self._lay_out(named)
        except (RuntimeError, TypeError, ValueError) as error:
            problem = error
        lines = [f"{name}: {describe(parameter)}" for name, parameter, _ in named]
        settings = {} if problem else hyperparameters_by_name(self.param_groups)
        try:
            validate_across_ranks(self._group, lines, problem, f"adds parameters to a {self.NAME}", settings)
        except BaseException:
            del self.param_groups[old_count:]
            raise
        old_masters, old_averages = self._masters, self.averages
        self._build(named, layout, masters)
        self._skipped.restart(int(self._counts.taken))
        trained = [parameter for _, parameter, _ in self._named]
        self._frozen.add(frozen(given), trained)
        self._untrained.add(frozen(given), trained)
        old_averages.move_to(self.averages, lambda flat: self._masters.completed(flat, old_masters))
        self._record_again()


def _has_lost_masters(parameter: Tensor) -> bool:
    """Return True for a quantized weight that was cast from FP32 masters which no longer exist."""
    if not isinstance(parameter, QuantizedWeight) or parameter.high_precision_init_val is not None:
        return False
    return parameter.state.is_cast_from_masters
