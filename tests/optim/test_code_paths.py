"""Ranks whose programs differ: all of them raise, none hangs, and afterwards they can go on together."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import zerocast
from tests.fsdp2.models import slow
from tests.observed import debug_mode
from tests.optim.runs import Compared, Run, Trainer
from tests.workers import error_of, on_ranks

RUN = Run()
Call = Callable[[Trainer], object]


def step(trainer: Trainer, passes: int = 1, max_norm: float | None = None, factor: float = 1.0) -> None:
    """A step after so many backward passes, clipped if so said, with a learning rate that is multiplied."""
    for _ in range(passes):
        trainer.backward(1)
    if max_norm is not None:
        trainer.optimizer.clip_grad_norm_(max_norm)
    trainer.optimizer.param_groups[0]["lr"] *= factor
    trainer.optimizer.step()


QUICK = "steps with, reduces the gradients"
IN_DEBUG_MODE: dict[str, tuple[Call, Call]] = {
    "reduces the gradients, verifies": (step, lambda trainer: zerocast.verify(trainer.optimizer)),
    QUICK: (step, lambda trainer: step(trainer, passes=2)),
    "steps with, clips gradients to 0.1": (step, lambda trainer: step(trainer, max_norm=0.1)),
    "'lr': 0.01, 'lr': 0.005": (step, lambda trainer: step(trainer, factor=0.5)),
    "reduces the gradients, switches to a different recipe": (
        step,
        lambda trainer: zerocast.switch(trainer.optimizer, zerocast.Recipe({})),
    ),
}


@pytest.mark.parametrize("case", [case if case == QUICK else slow(case) for case in IN_DEBUG_MODE])
@on_ranks(2)
@debug_mode()
def test_steps_in_debug_mode(case: str) -> None:
    """What each rank raises, and soon; then a step that all make, with the bits of one that nothing came before."""
    trainer, start = Compared(RUN), time.monotonic()
    said = error_of(lambda: IN_DEBUG_MODE[case][dist.get_rank()](trainer))
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
