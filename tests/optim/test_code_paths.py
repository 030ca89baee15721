"""Ranks whose programs differ: all of them raise, none hangs, and afterwards they can go on together."""

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerocast
from tests.optim.runs import Run, Trainer, assert_equals
from tests.optim.undistributed import Undistributed
from tests.workers import Ranks
from zerocast import CastPlan, QuantizedWeight, ZeroConfig, verify
from zerocast.distributed.group import ONE_PROCESS
from zerocast.optim import Checkpoints, load, save

RUN = Run(config=ZeroConfig(bucket_size=4096, deterministic=True))
TIMEOUT = 2.0  # seconds
Call = Callable[[Trainer, Path], Any]


def plan(trainer: Trainer, folder: Path) -> None:
    """A plan over a weight that nobody has a master of."""
    CastPlan([QuantizedWeight.empty((32, 32), "nvfp4")], [None], [None], trainer.optimizer.process_group)


def backward_and_step(trainer: Trainer, folder: Path) -> None:
    trainer.backward(1)
    trainer.optimizer.step()


def twice(trainer: Trainer, folder: Path) -> None:
    trainer.backward(1)
    backward_and_step(trainer, folder)


def clipped(trainer: Trainer, folder: Path, norm: float = 0.1) -> None:
    trainer.backward(1)
    trainer.optimizer.clip_grad_norm_(norm)
    trainer.optimizer.step()


def scheduled(trainer: Trainer, folder: Path) -> None:
    """With a learning rate that the others do not have."""
    trainer.backward(1)
    trainer.optimizer.param_groups[0]["lr"] *= 0.5
    trainer.optimizer.step()


def switches(trainer: Trainer, folder: Path) -> None:
    zerocast.switch(trainer.optimizer, zerocast.Recipe({}))


EXCHANGES: dict[str, tuple[Call, Call]] = {  # what zerocast exchanges objects for: always noticed
    "builds a CastPlan, verifies": (plan, lambda t, _: verify(t.optimizer)),
    "builds a CastPlan, builds a ZeroAdamW": (plan, lambda t, _: Trainer(RUN, group=t.optimizer.process_group)),
    "saves a checkpoint, loads a checkpoint": (
        lambda t, folder: save(t.optimizer, folder / "new"),
        lambda t, folder: load(t.optimizer, folder / "old"),
    ),
    "loads a checkpoint, verifies": (
        lambda t, folder: Checkpoints(folder).load(t.optimizer),
        lambda t, _: verify(t.optimizer),
    ),
    "loads a state, saves a checkpoint": (
        lambda t, _: t.optimizer.load_state_dict(t.optimizer.state_dict()),
        lambda t, folder: Checkpoints(folder).save(t.optimizer, 1),
    ),
    "switches to another recipe, verifies": (switches, lambda t, _: verify(t.optimizer)),
}

IN_DEBUG_MODE: dict[str, tuple[Call, Call]] = {
    "reduces the gradients, verifies": (backward_and_step, lambda t, _: verify(t.optimizer)),
    "steps with, reduces the gradients": (backward_and_step, twice),
    "steps with, clips gradients to 0.1": (backward_and_step, clipped),
    "clips gradients to 0.2, clips gradients to 0.1": (lambda t, f: clipped(t, f, 0.2), clipped),
    "'lr': 0.01, 'lr': 0.005": (backward_and_step, scheduled),
    "reduces the gradients, switches to another recipe": (backward_and_step, switches),
}


CASES = {**EXCHANGES, **IN_DEBUG_MODE}


def differ(case: str, folder: str) -> tuple[str, float]:
    """What each rank raises and after how long; then a step that all make, with the bits of one that nothing came before."""
    trainer = Trainer(RUN)
    if not Path(folder, "old").exists():
        save(trainer.optimizer, Path(folder, "old"))
    dist.barrier()
    zerocast.set_debug(case in IN_DEBUG_MODE)
    start = time.monotonic()
    try:
        with pytest.raises(RuntimeError) as caught:
            CASES[case][dist.get_rank()](trainer, Path(folder))
        said, waited = str(caught.value), time.monotonic() - start
        for group, options in zip(trainer.optimizer.param_groups, RUN.options, strict=True):
            group["lr"] = options["lr"]
        trainer.optimizer.zero_grad()
        reference = Undistributed(RUN.specs)
        trainer.step(0)
        reference.step({spec.name: RUN.rounds(spec, 0, 2) for spec in RUN.specs}, RUN.options)
        assert_equals(trainer, reference, "together again")
    finally:
        zerocast.set_debug(False)
    return said, waited


def some(cases: Iterable[str], fast: str) -> list[Any]:
    """All of them, of which one is no slow test."""
    return [pytest.param(case, marks=[] if case == fast else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("case", some(IN_DEBUG_MODE, "steps with, reduces the gradients"))
def test_steps_in_debug_mode(ranks: Ranks, tmp_path: Path, case: str) -> None:
    _check(ranks(2)(differ, case, str(tmp_path)), case)


def _check(found: list[tuple[str, float]], case: str) -> None:
    first, second = case.split(", ", 1)
    for said, waited in found:
        assert said.startswith("ranks make different calls: rank 0 "), said
        zero, one = said.split(", rank 1 ")
        assert first in zero and second in one, said
        assert waited < 10.0


def equal_in_debug_mode() -> None:
    """Accumulation, passes without any gradient on a rank and skipped steps call no different rolls."""
    zerocast.set_debug(True)
    try:
        for run in (RUN, Run(accumulate=2, max_norm=0.5, config=RUN.config), Run(stage=1, accumulate=2, no_sync=False)):
            trainer, reference = Trainer(run), Undistributed(run.specs)
            for step in range(2):
                trainer.step(step)
                rounds = {spec.name: run.rounds(spec, step, dist.get_world_size()) for spec in run.specs}
                reference.step(rounds, run.options, run.max_norm)
                assert_equals(trainer, reference, f"step {step}")
        weight = torch.nn.Parameter(torch.ones(8))
        optimizer = zerocast.ZeroAdamW([("w", weight)])
        if dist.get_rank() == 0:
            weight.sum().backward()
        optimizer.step()
    finally:
        zerocast.set_debug(False)


def test_equal_programs_in_debug_mode(ranks: Ranks) -> None:
    ranks(2)(equal_in_debug_mode)


WITHOUT_DEBUG: dict[str, tuple[Call, Call]] = {  # tensors meet other tensors, or nobody
    "step, verify": IN_DEBUG_MODE["reduces the gradients, verifies"],
    "step, load": (backward_and_step, EXCHANGES["loads a state, saves a checkpoint"][0]),
    "step, nothing": (
        backward_and_step,
        lambda t, _: time.sleep(1.5 * TIMEOUT) or dist.barrier(t.optimizer.process_group),
    ),
    "another number of ranks": (plan, lambda t, _: _alone(t)),
    "step, switch": (backward_and_step, switches),
}


def _alone(trainer: Trainer) -> None:
    """A plan of this rank alone, while the other builds one of both; then something that both take part in."""
    CastPlan([QuantizedWeight.empty((32, 32), "nvfp4")], [None], [None], ONE_PROCESS)
    dist.barrier(trainer.optimizer.process_group)


def waits(case: str, folder: str) -> tuple[str, float]:
    """What each rank raises and after how long, in a group with a short timeout."""
    trainer = Trainer(RUN, group=dist.new_group(timeout=timedelta(seconds=TIMEOUT)))
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        WITHOUT_DEBUG[case][dist.get_rank()](trainer, Path(folder))
    return str(caught.value), time.monotonic() - start


@pytest.mark.slow
@pytest.mark.parametrize("case", WITHOUT_DEBUG)
def test_nobody_waits_longer_than_the_timeout(ranks: Ranks, tmp_path: Path, case: str) -> None:
    for said, waited in ranks(2)(waits, case, str(tmp_path)):
        assert said
        assert waited < 4 * TIMEOUT
