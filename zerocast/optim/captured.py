"""CapturedStep: an optimizer step whose device part is one CUDA graph.

The graph holds all that `DeviceStep` does, at fixed addresses: norm, clip, skip, Adam with its amaxes, the all-reduce, scales and
cast; then the all-gather and the columnwise copies. What the host does runs around it at every call as around an ordinary step:
reductions of the backward pass are finished, hyper-parameters that have changed are taken over, weights are looked for where they
were, and their casts are counted. With `overlap_all_gather` the all-gather follows the graph instead, since it outlives the step.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from zerocast import backends
from zerocast.optim.device_step import DeviceStep
from zerocast.optim.weights import ShardedWeights

Work = Callable[[], None]
MOVED = (
    "weights, scales or masters have moved since the step was captured, and the graph would write where they were: "
    "capture the step again"
)


def check_capturable(device: torch.device, backend: str) -> None:
    """RuntimeError for tensors, and for a backend, whose steps no CUDA graph can hold."""
    if device.type != "cuda":
        raise RuntimeError(
            f"only a step on CUDA tensors can be captured, these parameters are on {device}: call step()"
        )
    if "cuda" not in (backends.load(backend).DEVICES or ()):
        raise RuntimeError(f"the {backend} backend asks the host during a step, which cannot be captured: call step()")


def cuda_graph(work: Work) -> Work:
    """Record what `work` launches on the current device, without running it; the result launches it again.

    Other threads may use CUDA meanwhile, as the one that watches over NCCL does.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    replay: Work = graph.replay
    return replay


class CapturedStep:
    """Call it in place of `clip_grad_norm_` and `step`: one launch, the same bits. `ZeroAdamW.capture` makes one.

    Args:
        before, after: the host's part of a step, around the device's.
        max_norm: as in `clip_grad_norm_`; None leaves the clipping to calls of that.
        record: makes of some work what repeats it; `cuda_graph`, unless a test wants to look inside.

    To make one is a collective call. It first runs the device part as if a gradient were not finite, which changes nothing, so that
    what is made at first use is made before the recording.
    """

    def __init__(
        self,
        device: DeviceStep,
        weights: ShardedWeights,
        before: Work,
        after: Work,
        max_norm: float | None,
        record: Callable[[Work], Work] = cuda_graph,
    ) -> None:
        self._device, self._weights, self._before, self._after = device, weights, before, after
        self._max_norm = max_norm
        self._norm = torch.zeros_like(device.clip).view(())
        self._warm_up()  # what this finds missing it makes, and then everything lies elsewhere:
        self._warm_up()  # a backend may look into a table when it first sees it, not while the graph records
        self._tables = weights.tables()  # kept, since the graph reads them
        self._replay = record(self._work)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """One step with what the backward passes since the last have left; returns the norm before clipping, f32[].

        RuntimeError, with nothing changed, when storage has moved since the step was captured.
        """
        self._before()
        tables = self._weights.tables()
        if len(tables) != len(self._tables) or not all(
            a.lies_like(b) for a, b in zip(tables, self._tables, strict=True)
        ):
            raise RuntimeError(MOVED)
        with self._weights.plan.transaction("a captured step"):
            self._replay()
            if self._weights.overlap:
                self._weights.gather()
        self._after()
        return self._norm.clone()

    def _work(self) -> None:
        square_sum = self._device.square_sum()
        self._norm.copy_(square_sum.sqrt())
        if self._max_norm is not None:
            self._device.clip_to(self._max_norm, self._norm)
        self._device.update(square_sum)
        if not self._weights.overlap:
            self._weights.gather()

    def _warm_up(self) -> None:
        device, clip = self._device, self._device.clip.clone()
        self._weights.ready()
        square_sum = device.square_sum()
        device.clip_to(1.0, square_sum.sqrt().float())
        device.update(torch.full_like(square_sum, torch.nan))
        self._weights.gather()
        self._weights.done()
        device.skipped -= 1
        device.clip.copy_(clip)
        self._weights.ready()
