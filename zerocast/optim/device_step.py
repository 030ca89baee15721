"""The device's part of an optimizer step, launched by the host (DeviceStep) or as a CUDA graph
(CapturedStep).

Nothing in it waits for the device or asks the host, so one graph can hold all of it, at fixed
addresses: norm, clip, skip, Adam with its amaxes, the all-reduce, scales and cast; then the
all-gather and the columnwise copies. With `overlap_all_gather` the all-gather follows the graph,
since it outlives the step. The host's part before and after is in `zero_optimizer.py`, the same for
both.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from zerocast import backends
from zerocast.cast.adam_update import AdamUpdate
from zerocast.cast.hyperparameters import Hyperparameters
from zerocast.cast.plan import CastPlan
from zerocast.cast.tables import WeightTable
from zerocast.distributed.group import Group
from zerocast.optim.flat_masters import FlatMasters
from zerocast.optim.muon_step import MuonStep
from zerocast.optim.norm import LogicalOrder, clip_factor, square_sum
from zerocast.optim.sharded_weights import ShardedWeights

Work = Callable[[], None]
MOVED = (
    "what the step was captured with (parameters, gradients, states, scales or shards) has moved or was replaced, and the graph "
    "would write where it was: capture the step again"
)


class DeviceStep:
    """Norm, clip, skip, Adam and Muon, and the launch of the cast of what they make.

    Args:
        gradients: this rank's averaged gradients, flat f32 like the masters.
        order: that of a deterministic norm, or None for the library's.
        muon: the update of the matrices that this rank owns in whole, if there are any.

    `count` and `skipped`, int64[1], are the steps taken and skipped; `clip`, f32[1], is what the
    gradients of the coming step are multiplied by, 1 again after it; `clipped` says that the host
    asked for it, outside of a graph.
    """

    def __init__(
        self,
        gradients: Tensor,
        masters: FlatMasters,
        hyperparameters: Hyperparameters,
        order: LogicalOrder | None,
        group: Group,
        muon: MuonStep,
    ) -> None:
        self._gradients, self._masters, self._muon = gradients, masters, muon
        self._hyperparameters, self._order, self._group = hyperparameters, order, group
        self.count = torch.zeros(1, dtype=torch.int64, device=gradients.device)
        self.skipped = torch.zeros_like(self.count)
        self.clip = torch.ones(1, dtype=torch.float32, device=gradients.device)
        self.clipped = False

    def square_sum(self) -> Tensor:
        """Sum of squares of the averaged gradient, f64[], the same on every rank."""
        if self._order:
            return self._order.square_sum(self._gradients)
        return square_sum(self._gradients, self._group)

    def clip_to(self, max_norm: float, norm: Tensor) -> None:
        """Let the update scale gradients of f32[] `norm` so that it becomes at most `max_norm`."""
        self.clip.copy_(clip_factor(norm, max_norm))

    def apply_clip(self) -> bool:
        """Scale the gradients now, since somebody reads or changes them before the update. False
        if there was nothing to scale.
        """
        clipped, self.clipped = self.clipped, False
        if clipped:
            self._gradients.mul_(self.clip)
            self.clip.fill_(1.0)
        return clipped

    def launch(self, plan: CastPlan, square_sum: Tensor) -> None:
        """Step and cast with gradients of this sum of squares, f64[], after `plan.ready`.

        A sum that is not finite skips the step. Nothing here waits for the device.
        """
        found_inf = ~square_sum.isfinite().view(1)
        self.count += ~found_inf
        self.skipped += found_inf
        self._muon(self._gradients, self.clip, found_inf)
        masters, scalars = self._masters, self._hyperparameters.scalars(self.count)
        update = AdamUpdate(self._gradients, masters.exp_avg, masters.exp_avg_sq, scalars, self.clip)
        plan.launch(update=update, skip=found_inf)
        self.clip.fill_(1.0)


def check_capturable(device: torch.device, backend: str) -> None:
    """RuntimeError for tensors, and for a backend, whose steps no CUDA graph can hold."""
    if device.type != "cuda":
        raise RuntimeError(
            f"only a step on CUDA tensors can be captured, these parameters are on {device}: call step()"
        )
    if "cuda" not in (backends.load(backend).DEVICES or ()):
        raise RuntimeError(f"the {backend} backend asks the host during a step, which cannot be captured: call step()")


def cuda_graph(work: Work) -> Work:
    """Record what `work` launches on the current device, without running it; the result launches it
    again.

    Other threads may use CUDA meanwhile, as the one that watches over NCCL does.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    replay: Work = graph.replay
    return replay


class CapturedStep:
    """Call it in place of `clip_grad_norm_` and `step`: one launch, the same bits.
    `ZeroAdamW.capture` makes one.

    Args:
        prepare, finish: the host's part of a step, before and after the device's.
        max_norm: as in `clip_grad_norm_`; None leaves the clipping to calls of that.
        record: makes of some work what repeats it; `cuda_graph`, unless a test wants to look
            inside.

    To make one is a collective call. It first runs the device part as if a gradient were not
    finite, which changes nothing, so that what is made at first use is made before the recording.
    """

    def __init__(
        self,
        device: DeviceStep,
        weights: ShardedWeights,
        prepare: Work,
        finish: Work,
        max_norm: float | None,
        record: Callable[[Work], Work] = cuda_graph,
    ) -> None:
        self._device, self._weights, self._prepare, self._finish = device, weights, prepare, finish
        self._driver = weights.driver
        self._max_norm, self._record = max_norm, record
        self._norm = torch.zeros_like(device.clip).view(())
        self.capture()

    def capture(self) -> None:
        """Record the step for where everything lies now. Collective; it changes nothing."""
        self._warm_up()  # what this finds missing it makes, and then everything lies elsewhere:
        # a backend may look into a table when it first sees it, not while the graph records
        self._warm_up()
        # Kept, since the graph reads them.
        self._tables = self._lies_in()
        self._replay = self._record(self._work)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """One step with what the backward passes since the last have left; returns the norm before
        clipping, f32[].

        RuntimeError, with nothing changed, when storage has moved since the step was captured.
        """
        self._prepare()
        tables = self._lies_in()
        if len(tables) != len(self._tables) or not all(
            a.lies_like(b) for a, b in zip(tables, self._tables, strict=True)
        ):
            raise RuntimeError(MOVED)
        with self._driver.plan.transaction("a captured step"):
            self._replay()
            self._driver.plan.done()
            if self._weights.overlap:
                self._weights.gather.start(self._driver.plan)
            else:
                self._weights.gather.done()
        self._finish()
        return self._norm.clone()

    def _work(self) -> None:
        square_sum = self._device.square_sum()
        self._norm.copy_(square_sum.sqrt())
        if self._max_norm is not None:
            self._device.clip_to(self._max_norm, self._norm)
        self._device.launch(self._driver.plan, square_sum)
        if not self._weights.overlap:
            self._weights.gather.start(self._driver.plan)

    def _lies_in(self) -> list[WeightTable]:
        return [*self._driver.plan.tables, *self._weights.gather.tables()]

    def _warm_up(self) -> None:
        device, clip = self._device, self._device.clip.clone()
        self._driver.ready()
        square_sum = device.square_sum()
        device.clip_to(1.0, square_sum.sqrt().float())
        device.launch(self._driver.plan, torch.full_like(square_sum, torch.nan))
        self._driver.plan.done()
        self._weights.gather.start(self._driver.plan)
        device.skipped -= 1
        device.clip.copy_(clip)
        self._driver.ready()
