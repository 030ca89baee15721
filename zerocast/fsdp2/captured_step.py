"""CapturedStep: a step of FusedAdamW and the cast that follows it, as one CUDA graph.

The graph holds all that a step and a cast do on the device: scalars from learning rates and step
counts that lie there, Adam with its amaxes, the all-reduce of amaxes, scales, codes and headers.
What changes from step to step is written to fixed addresses before a replay: hyper-parameters, and
where the gradients lie, which FSDP2 allocates anew. The rest stays outside: backward passes with
their reductions, clipping, and the gathers.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.manager import CastManager
from zerocast.optim.device_step import MOVED, Work, cuda_graph
from zerocast.weight.validity import Validity, transaction

WITHIN_BACKWARD = (
    "a captured step is taken within a backward pass: take it after, or call step() from hooks of gradients"
)


class StandIns(Protocol):
    """Tensors that a graph is recorded with in place of others, which lie elsewhere each time."""

    tensors: list[Tensor]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Let the next replay use these, as many and as large as before."""


class CapturableOptimizer(torch.optim.Optimizer):
    """An optimizer whose step has two parts: `prepare` on the host, `launch` on the device."""

    @abstractmethod
    def prepare(self) -> object:
        """The host's part; returns another object once anything lies elsewhere, None if this rank
        takes no step.
        """

    @property
    @abstractmethod
    def managers(self) -> Sequence[CastManager]:
        """The managers of the prepared models whose masters it steps."""

    @property
    @abstractmethod
    def validities(self) -> list[Validity]:
        """The validities of masters and moments."""

    @abstractmethod
    def passes(self) -> Sequence[Any]:
        """The launches of a step, with their `gradients()`."""

    @abstractmethod
    def launch(self, gradients: Mapping[Any, list[Tensor]]) -> None:
        """The device's part of a step, with other `gradients` for some of its passes."""


class CapturedStep:
    """Call it in place of `step()`: the same bits. `FusedAdamW.capture` makes one.

    Args:
        optimizer: whose step it is.
        stand_ins: makes tensors that stand for gradients in a graph; None where what repeats the
            work looks for them itself.
        record: makes of some work what repeats it; `cuda_graph`, unless a test wants to look
            inside.

    The first call takes an ordinary step and casts, so that what is made at first use is made
    before the second one records.
    """

    def __init__(
        self,
        optimizer: CapturableOptimizer,
        stand_ins: Callable[[Sequence[Tensor]], StandIns] | None,
        record: Callable[[Work], Work] = cuda_graph,
    ) -> None:
        self._optimizer, self._make_stand_ins, self._record = optimizer, stand_ins, record
        self._bound: object = None
        self._replay: Work | None = None
        self._stand_ins: dict[Any, StandIns] = {}

    @torch.no_grad()
    def __call__(self) -> None:
        """One step with the gradients as they are now, and the cast of all prepared weights.

        All ranks call it. RuntimeError, with nothing changed, where anything lies elsewhere than
        when the step was captured, within a backward pass, and where ranks disagreed in the step
        before.
        """
        if torch_fsdp.backward_pass() is not None:
            raise RuntimeError(WITHIN_BACKWARD)
        bound = self._optimizer.prepare()
        managers = self._optimizer.managers
        if bound is None:
            self._cast_alone()
            return
        if self._bound is not None and bound is not self._bound:
            raise RuntimeError(MOVED)
        if self._bound is None or any(manager.must_seed for manager in managers):
            for manager in managers:
                manager.before_first_step()
            self._optimizer.step()
            for manager in managers:
                manager.cast_first_step()
            self._bound = self._optimizer.prepare()
            return
        for manager in managers:
            manager.before_captured_cast(self._optimizer)
        with transaction(self._optimizer.validities, "a captured step"):
            self._fill_stand_ins()
            if self._replay is None:
                self._replay = self._record(self._work)
            self._replay()
            for manager in managers:
                manager.after_cast(repeat=False)
        # torch's schedulers look for it; only a call of `step` itself sets it
        setattr(self._optimizer, "_opt_called", True)  # noqa: B010

    def _cast_alone(self) -> None:
        """Take no step, and cast as the other ranks do within this call."""
        for manager in self._optimizer.managers:
            manager.make_due(self._optimizer)
            manager.before_gather()

    def _fill_stand_ins(self) -> None:
        if self._make_stand_ins is None:
            return
        for one in self._optimizer.passes():
            gradients = one.gradients()
            if one not in self._stand_ins:
                self._stand_ins[one] = self._make_stand_ins(gradients)
            self._stand_ins[one].fill(gradients)

    def _work(self) -> None:
        self._optimizer.launch({one: held.tensors for one, held in self._stand_ins.items()})
        for manager in self._optimizer.managers:
            manager.launch_cast()
