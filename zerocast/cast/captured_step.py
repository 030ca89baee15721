"""CapturedStep: an optimizer step and its cast as one CUDA graph, for every optimizer.

The graph contains the device's part of a step, at fixed addresses: scalars from learning rates and
step counts, the update with its amaxes, their all-reduce, scales and codes. The CPU's part is
outside the graph, and is the same as in an ordinary step.
"""

import abc
import contextlib
import gc
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerocast import backends

Work = Callable[[], None]
logger = logging.getLogger(__name__)


class CapturableStep(abc.ABC):
    """A step in parts: a CUDA graph replays the device's part, and the CPU does the rest."""

    @abc.abstractmethod
    def prepare(self) -> Any:
        """Do the CPU's part before the device's.

        Returns a description of the memory that the device's part reads and writes, for
        `has_same_memory`. None if this rank takes no step. A rank that returns None or raises has
        taken part in the collectives of the ranks that step, unless all ranks raise.
        """

    @abc.abstractmethod
    def has_same_memory(self, now: Any, recorded: Any) -> bool:
        """Return True if the device's part reads and writes the same memory as when it was
        recorded.
        """

    def rehearse(self) -> Any:
        """Run the device's part without changing a master or a weight, because some memory and
        kernels are only made at their first use. Collective. Returns the result of `prepare`, or
        None if the optimizer cannot rehearse, so that its first call must be an ordinary step.
        """
        return None

    @abc.abstractmethod
    def step_without_graph(self) -> Any:
        """Take the step that was prepared, with the collectives of a replay. Returns the result of
        `prepare`. The next step can be recorded if it uses the same memory.
        """

    @property
    def must_step_without_graph(self) -> bool:
        """True if no graph can contain the next step."""
        return False

    @abc.abstractmethod
    def launch_context(self) -> contextlib.AbstractContextManager[None]:
        """Do the CPU's part right before and right after the device's. An exception inside leaves
        masters and weights partial.
        """

    @abc.abstractmethod
    def launch(self) -> None:
        """Run the device's part. It neither waits for the device nor depends on values there."""

    @abc.abstractmethod
    def finish(self) -> Tensor | None:
        """Do the CPU's part after the step, and return the result of the step."""


def check_capturable(device: torch.device, backend: str) -> None:
    """Raise RuntimeError for tensors, and for a backend, whose steps no CUDA graph can hold."""
    if device.type != "cuda":
        raise RuntimeError(
            f"only a step on CUDA tensors can be captured, these parameters are on {device}: call step()"
        )
    if "cuda" not in (backends.load(backend).DEVICES or ()):
        raise RuntimeError(f"the {backend} backend needs the CPU during a step, so it cannot be captured: call step()")


def cuda_graph(work: Work) -> Work:
    """Record the launches of `work` on the current device, without running it. The result launches
    it again.

    Other threads, such as NCCL's watchdog, may use CUDA in the meantime.
    """
    # An earlier graph that is garbage would invalidate this one if it were collected meanwhile.
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    replay: Work = graph.replay
    return replay


class CapturedStep:
    """A step to call in place of `step()`: the same bits, with one launch for the device's part.
    `ZeroAdamW.capture` and `FusedAdamW.capture` make one.

    Making it is collective. If the step can be rehearsed, it is recorded immediately, else by the
    second call; the first one is an ordinary step.
    """

    # Tests without CUDA replace it.
    _record = staticmethod(cuda_graph)

    def __init__(self, step: CapturableStep) -> None:
        self._step = step
        # The memory at the last step or rehearsal without a graph, as `prepare` describes it. Kept,
        # since the graph reads its tables.
        self._memory: Any = None
        # None until the step is recorded.
        self._replay: Work | None = None
        self.capture()

    def capture(self) -> None:
        """Record the step for the current memory if it can be rehearsed. Collective. Changes no
        master and no weight.
        """
        self._memory = self._step.rehearse()
        if self._memory is not None:
            self._replay = self._record(self._step.launch)

    @torch.no_grad()
    def __call__(self) -> Tensor | None:
        """Take one step with the gradients as they are now, and cast. All ranks call it.

        If anything has moved since the step was recorded, such as a state that was loaded, this
        rank takes an ordinary step and records the next one in the new memory. That needs no other
        rank, so it may happen on some ranks alone.

        Returns the result of the optimizer's step: the norm before clipping, f32[], for ZeroAdamW,
        None for FusedAdamW.
        """
        memory = self._step.prepare()
        if memory is None:
            return None
        has_moved = self._memory is None or not self._step.has_same_memory(memory, self._memory)
        if has_moved and self._replay is not None:
            logger.info("memory of a captured step has moved or was replaced: it is recorded again")
            self._replay = None
        if has_moved or self._step.must_step_without_graph:
            self._memory = self._step.step_without_graph()
            return self._step.finish()
        with self._step.launch_context():
            if self._replay is None:
                self._replay = self._record(self._step.launch)
            self._replay()
        return self._step.finish()
