"""DeviceStep: the part of an optimizer step that runs on the device, for ordinary and for captured
steps.

Nothing in it waits for the device or needs the CPU, so one CUDA graph can hold all of it: norm,
clip, skip, Adam with its amaxes, the all-reduce, scales and cast, then the all-gather and the
columnwise copies. With `overlap_all_gather` the all-gather follows the graph, since it outlives the
step. The CPU's part before and after is in `zero_optimizer.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from zerocast.cast.adam_update import Hyperparameters
from zerocast.cast.captured_step import CapturableStep
from zerocast.cast.host import StepCollectives
from zerocast.cast.plan import CastPlan
from zerocast.cast.tables import WeightTable
from zerocast.optim.flat_masters import FlatMasters
from zerocast.optim.gradient_shard import GradientShard
from zerocast.optim.muon_step import MuonStep
from zerocast.optim.norm import clip_factor
from zerocast.optim.sharded_weights import ShardedWeights
from zerocast.optim.step_counts import StepCounts


class DeviceStep:
    """Norm, clip, skip, Adam and Muon, and the launch of the cast of the updated masters.

    Args:
        gradients: this rank's averaged gradients, flat like the masters.
        masters: the masters and moments of this rank.
        hyperparameters: of all parameter groups, on the device.
        muon: the update of the matrices that this rank owns. None if Muon updates no parameter.
        counts: the steps taken, by parameter group.
        skipped: i64[1], the steps skipped.

    Attributes:
        clip: f32[1], the factor of the coming step's gradients; 1 again after the step.
        clipped: True if `clip_grad_norm_` has set that factor, outside of a graph.
        step_collectives: the collectives of `launch` around its cast, for a rank that cannot step.
    """

    def __init__(
        self,
        gradients: GradientShard,
        masters: FlatMasters,
        hyperparameters: Hyperparameters,
        muon: MuonStep | None,
        counts: StepCounts,
        skipped: Tensor,
    ) -> None:
        self.gradients, self._masters, self._muon = gradients, masters, muon
        self._hyperparameters = hyperparameters
        self.counts, self.skipped = counts, skipped
        self.clip = torch.ones(1, dtype=torch.float32, device=gradients.flat.device)
        self.clipped = False
        self.step_collectives = StepCollectives()
        if muon is not None:
            before_cast = functools.partial(muon.join_collectives, gradients)
            self.step_collectives = self.step_collectives._replace(before_cast=before_cast)
        if masters.eight_bit is not None:
            after_cast = masters.eight_bit.cut_groups.join_collectives
            self.step_collectives = self.step_collectives._replace(after_cast=after_cast)

    def square_sum(self) -> Tensor:
        """Return the sum of squares of the averaged gradient, f64[], the same on every rank."""
        return self.gradients.norms.square_sum(self.gradients.flat, begun=False)

    def clip_to(self, max_norm: float, norm: Tensor) -> None:
        """Let the update scale gradients of f32[] `norm` so that it becomes at most `max_norm`."""
        self.clip.copy_(clip_factor(norm, max_norm))

    def apply_clip(self) -> bool:
        """Scale the gradients now, because they are read or changed before the update. Returns
        False if there was nothing to scale.
        """
        clipped, self.clipped = self.clipped, False
        if clipped:
            self.gradients.widen()
            self.gradients.flat.mul_(self.clip)
            self.clip.fill_(1.0)
        return clipped

    def launch(self, plan: CastPlan, square_sum: Tensor) -> None:
        """Step and cast with gradients of this sum of squares, f64[], after `plan.ready`.

        A sum that is not finite skips the step. Nothing here waits for the device.
        """
        found_inf = ~square_sum.isfinite().view(1)
        self.counts.count(~found_inf)
        self.skipped += found_inf
        grad = self.gradients.flat
        if self._muon is not None:
            self._muon(grad, self.clip, found_inf)
        scalars = self._hyperparameters.scalars(self.counts.of_groups)
        update = self._masters.update(grad, scalars, self.clip, self.counts.of_groups)
        plan.launch(update=update, skip=found_inf)
        self.clip.fill_(1.0)


class StepMemory(NamedTuple):
    """The memory whose addresses a captured step holds."""

    gradients: Tensor
    tables: list[WeightTable]


class CapturableZeroStep(CapturableStep):
    """A step of ZeroAdamW as a CUDA graph holds it: norm, clip, skip, Adam, cast, and the gathers
    unless they overlap the next forward pass.

    Args:
        parts: returns the current DeviceStep of the optimizer, and the weights, which are cast and
            gathered.
        prepare, finish: the optimizer's part of a step on the CPU, before and after the device's.
        max_norm: as in `clip_grad_norm_`. With None the step clips nothing by itself.
    """

    def __init__(
        self,
        parts: Callable[[], tuple[DeviceStep, ShardedWeights]],
        prepare: Callable[[], None],
        finish: Callable[[], None],
        max_norm: float | None,
    ) -> None:
        self._parts, self._prepare, self._finish, self._max_norm = parts, prepare, finish, max_norm
        self._find_parts()
        # The norm of the last step's gradients before clipping.
        self._norm = torch.zeros_like(self._device.clip).view(())

    def _find_parts(self) -> None:
        """Find the parts of the step, which the optimizer replaces when parameters are added."""
        self._device, self._weights = self._parts()
        self._plan = self._weights.driver.plan

    def prepare(self) -> StepMemory:
        """Prepare the step on the CPU. Returns the memory that it works in."""
        self._prepare()
        self._find_parts()
        if self._plan.problem is not None:
            self._refuse("a captured step", masters=True)
        return self._memory()

    def has_same_memory(self, now: StepMemory, recorded: StepMemory) -> bool:
        """Return True if gradients and tables have the same addresses."""
        same = now.gradients is recorded.gradients and len(now.tables) == len(recorded.tables)
        return same and all(a.has_same_memory(b) for a, b in zip(now.tables, recorded.tables, strict=True))

    def rehearse(self) -> StepMemory:
        """Run the device's part as if a gradient were not finite, which changes nothing."""
        self._find_parts()
        self._run_skipped_step()
        # The first run allocates missing buffers, so tables change. The second run shows the new
        # tables to the backend, which may read a table at its first use. No graph may record that.
        self._run_skipped_step()
        return self._memory()

    def step_without_graph(self) -> StepMemory:
        """Take the step by launches of its parts."""
        # Read before the step. Memory that the step allocates has never been used, and no graph may
        # record the first use of a table.
        memory = self._memory()
        with self.launch_context():
            self.launch()
        return memory

    @contextlib.contextmanager
    def launch_context(self) -> Iterator[None]:
        """Count the cast, and gather the weights if the graph does not."""
        with self._plan.validity.transaction("a captured step"):
            yield
            self._plan.done()
            if self._weights.overlap:
                self._weights.gather.start(self._plan)
            else:
                self._weights.gather.done()

    def launch(self) -> None:
        """Clip, step, cast, and gather unless that overlaps the next forward pass."""
        square_sum = self._device.square_sum()
        self._norm.copy_(square_sum.sqrt())
        if self._max_norm is not None:
            self._device.clip_to(self._max_norm, self._norm)
        self._device.launch(self._plan, square_sum)
        if not self._weights.overlap:
            self._weights.gather.start(self._plan)

    def finish(self) -> Tensor:
        """Finish the step on the CPU. Returns the norm before clipping, f32[]."""
        self._finish()
        return self._norm.clone()

    def _memory(self) -> StepMemory:
        return StepMemory(self._device.gradients.flat, [*self._plan.tables, *self._weights.gather.tables()])

    def _run_skipped_step(self) -> None:
        device = self._device
        before = device.skipped.clone(), device.clip.clone()
        self._weights.driver.ready()
        if self._plan.problem is not None:
            self._refuse("the capture of a step", masters=False)
        try:
            with self._plan.validity.transaction("the capture of a step", masters=False):
                square_sum = device.square_sum()
                device.clip_to(1.0, square_sum.sqrt().float())
                device.launch(self._plan, torch.full_like(square_sum, torch.nan))
                self._plan.done()
                self._weights.gather.start(self._plan)
        finally:
            torch._foreach_copy_([device.skipped, device.clip], before)
        self._weights.driver.ready()

    def _refuse(self, what: str, *, masters: bool) -> NoReturn:
        """Raise the problem of this rank after the collectives of a step that other ranks take.

        `what` and `masters` describe the step, as in `CastDriver.join_collectives`.
        """
        before_cast, after_cast = self._device.step_collectives

        def norm_and_gradients() -> None:
            self._device.square_sum()
            before_cast()

        collectives = StepCollectives(norm_and_gradients, after_cast)
        self._weights.driver.join_collectives(what, collectives, masters=masters)
