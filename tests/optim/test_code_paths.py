"""Ranks whose programs differ: all of them raise, none hangs, and afterwards they can go on together."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerocast
from tests.fsdp2.models import slow
from tests.observed import debug_mode
from tests.optim.runs import Compared, Run, Trainer
from tests.workers import error_of, on_ranks
from zerocast import verify

RUN = Run()
Call = Callable[[Trainer, Path], Any]


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


QUICK = "steps with, reduces the gradients"
IN_DEBUG_MODE: dict[str, tuple[Call, Call]] = {
    "reduces the gradients, verifies": (backward_and_step, lambda t, _: verify(t.optimizer)),
    QUICK: (backward_and_step, twice),
    "steps with, clips gradients to 0.1": (backward_and_step, clipped),
    "clips gradients to 0.2, clips gradients to 0.1": (lambda t, f: clipped(t, f, 0.2), clipped),
    "'lr': 0.01, 'lr': 0.005": (backward_and_step, scheduled),
    "reduces the gradients, switches to a different recipe": (backward_and_step, switches),
}


@pytest.mark.parametrize("case", [case if case == QUICK else slow(case) for case in IN_DEBUG_MODE])
@on_ranks(2)
@debug_mode()
def test_steps_in_debug_mode(tmp_path: Path, case: str) -> None:
    """What each rank raises, and soon; then a step that all make, with the bits of one that nothing came before."""
    trainer, start = Compared(RUN), time.monotonic()
    said = error_of(lambda: IN_DEBUG_MODE[case][dist.get_rank()](trainer, tmp_path))
    assert time.monotonic() - start < 10.0
    assert said.startswith("RuntimeError: ranks make different calls: rank 0 "), said
    for expected, of_rank in zip(case.split(", ", 1), said.split(", rank 1 "), strict=True):
        assert expected in of_rank, said
    for group, options in zip(trainer.optimizer.param_groups, RUN.options, strict=True):
        group["lr"] = options["lr"]
    trainer.optimizer.zero_grad()
    trainer.go_on(0)


@on_ranks(2)
@debug_mode()
def test_equal_programs_in_debug_mode() -> None:
    """Accumulation, passes without any gradient on a rank and skipped steps call no different rolls."""
    for run in (RUN, Run(accumulate=2, max_norm=0.5), Run(stage=1, accumulate=2, no_sync=False)):
        Compared(run).go_on(0, 1)
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = zerocast.ZeroAdamW([("w", weight)])
    if dist.get_rank() == 0:
        weight.sum().backward()
    optimizer.step()
