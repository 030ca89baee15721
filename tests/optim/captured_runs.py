"""Two optimizers of one model side by side: one takes ordinary steps, the other a captured one, with the same gradients."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tests import casts
from tests.optim.runs import Run, Trainer, snapshot
from zerocast import QuantizedWeight
from zerocast.cast.captured_step import CapturedStep, Work
from zerocast.formats import Columnwise
from zerocast.optim.device_step import CapturableZeroStep

SKIPPED, ORDINARY = 3, 5  # a step with a gradient that is not finite; one that both take with step()
LOADED = 7  # before this step a state is loaded


@dataclass(frozen=True)
class Case(Run):
    """A training run whose gradients are put on parameters. Without `max_norm` the captured step clips nothing."""

    assign: bool = True
    max_norm: float | None = 0.5
    tensor_lr: bool = False
    steps: int = 9


class Repeated(CapturedStep):
    """A captured step with repeated work in place of a CUDA graph where there is none. Recording launches
    nothing there either.
    """

    @staticmethod
    def _record(work: Work) -> Work:
        return work


@contextlib.contextmanager
def repeated() -> Iterator[None]:
    """While the context is open, `optimizer.capture` makes such steps on a CPU."""
    with (
        mock.patch("zerocast.optim.zero_optimizer.CapturedStep", Repeated),
        mock.patch("zerocast.optim.zero_optimizer.check_capturable"),
    ):
        yield


class Trainee(Trainer):
    """A run that may take captured steps."""

    def __init__(self, case: Case, group: Any = None) -> None:
        super().__init__(case, group)
        for options in self.optimizer.param_groups if case.tensor_lr else ():
            options["lr"] = torch.tensor(options["lr"], device=case.device)

    def capture(self, kind: type[CapturedStep] = Repeated) -> CapturedStep:
        """Return the step as a graph, or on the CPU as something that acts like one."""
        o, limit = self.optimizer, self.run.max_norm
        if self.run.device != "cpu":
            return o.capture(limit)
        return kind(CapturableZeroStep(o._parts, o._prepare, o._finish, limit))

    def backward(self, step: int) -> None:
        """Make new gradients, with an infinite one on rank 0 in the step to be skipped."""
        super().backward(step)
        if step == SKIPPED and self.rank == 0:
            self.probe.get_parameter("nv").grad[0, 0] = torch.inf

    def change_rates(self, step: int) -> None:
        """Change learning rates, numbers and tensors alike, as a scheduler does."""
        for group in self.optimizer.param_groups:
            if step % 2:
                group["lr"] *= 0.7

    def ordinary_step(self) -> Tensor:
        limit = self.run.max_norm
        norm = self.optimizer.clip_grad_norm_(1e30 if limit is None else limit)
        self.optimizer.step()
        return norm

    def held(self) -> casts.Bytes:
        """Return everything that a step changes, columnwise copies too, which must be of the last cast where
        they are kept.
        """
        quantized = [p for p in self.probe.parameters() if isinstance(p, QuantizedWeight)]
        kept = [p for p in quantized if self.run.config.keep_columnwise and p.format.columnwise is not Columnwise.NONE]
        assert all(p.state.columnwise_is_fresh() for p in kept)
        return snapshot(self) | {"skipped": np.array([self.optimizer.skipped_steps], np.uint8)}


def compare(case: Case, group: Any = None) -> int:
    """Train both, and compare all that they hold after each step; returns the steps that were skipped."""
    eager, replaying = Trainee(case, group), Trainee(case, group)
    before = replaying.held()
    captured = replaying.capture()
    casts.assert_same_bytes(replaying.held(), before, "capturing changed something")
    for step in range(case.steps):
        for trainee in (eager, replaying):
            if step == LOADED:
                trainee.optimizer.load_state_dict(trainee.optimizer.state_dict())
            trainee.backward(step)
            trainee.change_rates(step)
        norms = eager.ordinary_step(), replaying.ordinary_step() if step == ORDINARY else captured()
        assert torch.equal(*norms) or step == SKIPPED, (step, norms)
        casts.assert_same_bytes(replaying.held(), eager.held(), f"rank {eager.rank}, step {step}, {case}")
    assert int(replaying.optimizer.state_dict()["optim"]["state"]["nv"]["step"]) == case.steps - 1
    return replaying.optimizer.skipped_steps
