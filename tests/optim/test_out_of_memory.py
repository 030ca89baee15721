"""Memory that runs out at any operator of a step: it can be taken again, or every later call says what to do; never wrong bits."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import casts
from tests.optim.faults import OutOfMemory
from tests.optim.probe import Spec
from tests.optim.runs import Run, Trainer, assert_equals
from tests.optim.undistributed import Undistributed
from zerocast import CastPlan, QuantizedWeight, ZeroConfig
from zerocast.optim import Checkpoints

SPECS = (
    Spec("embedding", (50, 24)),
    Spec("delayed", (48, 80), "fp8_delayed:amax_history_len=3"),
    Spec("mx", (64, 96), "mxfp8"),
    Spec("nv", (48, 112), "nvfp4"),
    Spec("norm", (37,), dtype=torch.float32, group=1),
)
EAGER = Run(SPECS, config=ZeroConfig(bucket_size=4096, deterministic=True))
OVERLAP = Run(SPECS, config=ZeroConfig(bucket_size=4096, deterministic=True, overlap_all_gather=True))
STAGE_1 = Run(SPECS, stage=1, max_norm=0.5, config=ZeroConfig(bucket_size=1, deterministic=True))
SAID = "raised half-way: masters, moments and weights may be of different steps; load a checkpoint"


class Repeated:
    """A trainer beside the reference, with a checkpoint of its second step; each attempt of the third one starts there."""

    def __init__(self, run: Run, folder: str) -> None:
        self.trainer, self.checkpoints = Trainer(run), Checkpoints(folder, keep=None)
        self._reference = Undistributed(run.specs)
        for step in range(2):
            self.trainer.step(step)
            self._advance(self._reference, step)
        self.checkpoints.save(self.trainer.optimizer, 2)

    def _advance(self, reference: Undistributed, step: int) -> None:
        run = self.trainer.run
        reference.step({s.name: run.rounds(s, step, 1) for s in run.specs}, run.options_at(step), run.max_norm)

    def load(self) -> None:
        """Back to the end of the second step."""
        self.checkpoints.load(self.trainer.optimizer)

    def attempt(self, memory: OutOfMemory, where: str) -> str:
        """The third step, in which memory runs out in the backward pass or in `step`; then whatever must be, and a fourth one.

        Returns what was to be done: "nothing" when memory lasted, "again" or "load".
        """
        trainer = self.trainer
        try:
            with memory if where == "backward" else _enough():
                trainer.backward(2)
            with memory if where == "step" else _enough():
                if trainer.run.max_norm is not None:
                    trainer.optimizer.clip_grad_norm_(trainer.run.max_norm)
                trainer.optimizer.step()
            with memory if where == "read" else _enough():
                _read(trainer)
            trainer.optimizer.zero_grad()
            outcome = "nothing"
        except torch.OutOfMemoryError:
            trainer.optimizer.zero_grad()
            outcome = "again" if where != "read" else "nothing"
            if trainer.optimizer._weights.plan.guard.is_partial:
                outcome = "load"
                self._is_refused()
                self.load()
            if outcome != "nothing":
                trainer.step(2)
        reference = copy.deepcopy(self._reference)
        self._advance(reference, 2)
        assert_equals(trainer, reference, f"{outcome} after operator {memory.count} of {where}")
        trainer.step(3)
        self._advance(reference, 3)
        assert_equals(trainer, reference, "a step later")
        return outcome

    def _is_refused(self) -> None:
        """Everything that would go on from, save or read what is torn."""
        optimizer, folder = self.trainer.optimizer, self.checkpoints
        calls: list[Callable[[], object]] = [
            optimizer.step,
            lambda: optimizer.clip_grad_norm_(1.0),
            optimizer.state_dict,
            lambda: folder.save(optimizer, 9),
            lambda: self.trainer.probe.get_parameter("nv").dequantize(),
            lambda: self.trainer.probe.backward(0, 0),
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match=SAID):
                call()
        assert folder.steps() == [2]


def _enough() -> OutOfMemory:
    return OutOfMemory(-1)


def _read(trainer: Trainer) -> None:
    for parameter in trainer.probe.parameters():
        if isinstance(parameter, QuantizedWeight):
            parameter.wait()


def at_operators(run: Run, folder: str, where: str, every: int) -> Counter[str]:
    """Memory runs out at every so manieth operator, before it and after it; how often what was to be done."""
    repeated, outcomes = Repeated(run, folder), Counter[str]()
    for afterwards in (False, True):
        at = every // 2 * afterwards
        while True:
            memory = OutOfMemory(at, afterwards)
            repeated.load()
            outcomes[repeated.attempt(memory, where)] += 1
            if memory.count <= at:
                break
            at += every
    return outcomes


def test_some_operators_of_a_step(tmp_path: Any) -> None:
    outcomes = at_operators(EAGER, str(tmp_path), "step", 11)
    assert outcomes["again"] and outcomes["load"], outcomes
    assert outcomes["nothing"] == 2, "once with enough memory, before and after"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("where", ["backward", "step", "read"])
@pytest.mark.parametrize("run", [EAGER, OVERLAP, STAGE_1], ids=["eager", "overlap", "stage 1"])
def test_every_operator(tmp_path: Any, run: Run, where: str) -> None:
    """On one rank; of several, where one alone runs out, see test_dead_ranks.py."""
    outcomes = at_operators(run, str(tmp_path), where, 1)
    assert outcomes["nothing"] >= 2
    assert bool(outcomes["load"]) == (where == "step"), outcomes
    assert bool(outcomes["again"]) == (where != "read"), outcomes


def test_a_cast_is_cast_again() -> None:
    """A plan's cast that died is not read; the next one writes all of it, as if nothing had been."""
    formats = ("nvfp4", "fp8_block", "mxfp8", "fp8_delayed:amax_compute_algo=most_recent,amax_history_len=3")
    weights, twins = ([QuantizedWeight.empty((64, 96), fmt) for fmt in formats] for _ in range(2))
    masters = [torch.randn(64 * 96) for _ in weights]
    plan, twin = (CastPlan(held, masters, [0] * len(held)) for held in (weights, twins))
    torn = 0
    for attempt in range(400):
        for master in masters:
            master.normal_()
        memory = OutOfMemory(attempt // 2, afterwards=attempt % 2 == 1)
        try:
            with memory:
                plan.cast()
        except torch.OutOfMemoryError:
            torn += plan.guard.is_partial
            if plan.guard.is_partial:
                with pytest.raises(RuntimeError, match=r"a cast raised half-way: .* cast again"):
                    weights[0].dequantize()
            plan.cast()
        plan.post_all_gather()
        twin.cast()
        twin.post_all_gather()
        for weight, other in zip(weights, twins, strict=True):
            casts.assert_same_bytes(casts.bytes_of(weight), casts.bytes_of(other), f"{weight.format}, {attempt}")
        if memory.count <= attempt // 2:
            break
    assert torn > 10
