"""A gradient that is not finite, on any rank: the step is skipped on all of them and nothing has changed."""

import dataclasses

import pytest
import torch

from tests import casts
from tests.observed import logged
from tests.optim.runs import EIGHT_BIT_MOMENTS, OVERLAP, Compared, Run, Trainer, snapshot, world
from tests.optim.test_muon import SMALL
from tests.selection import some, worlds
from tests.workers import on_ranks
from zerocast import ZeroAdamW, ZeroConfig

LIBRARY_ORDER = ZeroConfig(bucket_size=4096)
FP8_WIRE = ZeroConfig(bucket_size=4096, grad_wire="fp8_1x128")
# With the parameter that is poisoned.
RUNS = {
    "clip": (Run(max_norm=0.1), "delayed"),
    "plain": (Run(), "nv"),
    "stage 1": (Run(stage=1), "norm"),
    "overlap": (Run(config=OVERLAP), "mx"),
    "library order": (Run(config=LIBRARY_ORDER, max_norm=0.1), "block"),
    "fp8 wire": (Run(config=FP8_WIRE, max_norm=0.1), "nv"),
    "8-bit moments": (Run(config=EIGHT_BIT_MOMENTS, max_norm=0.1), "nv"),
    "Muon": (dataclasses.replace(SMALL, max_norm=0.1), "nv"),
    "Muon, not clipped": (SMALL, "norm"),
    "Muon, 8-bit momentum": (dataclasses.replace(SMALL, max_norm=0.1, config=EIGHT_BIT_MOMENTS), "nv"),
}


def poison(trainer: Trainer, step: int, name: str, value: float, culprit: int) -> None:
    """Run a backward pass in which one element of one gradient of one rank is `value`."""
    gradients = {spec.name: spec.gradient(step, trainer.rank) for spec in trainer.run.specs}
    if trainer.rank == culprit:
        (spec,) = (spec for spec in trainer.run.specs if spec.name == name)
        gradients[name] = torch.zeros(spec.shape, dtype=spec.dtype)
        gradients[name].view(-1)[-1] = value
    trainer.probe.loss(gradients).backward()


@pytest.mark.parametrize(
    "value", [float("nan"), *(pytest.param(x, marks=pytest.mark.slow) for x in (float("inf"), -float("inf")))]
)
@pytest.mark.parametrize("case", some(RUNS, "stage 1", "fp8 wire", "8-bit moments", "Muon, 8-bit momentum"))
@pytest.mark.notices(
    "a gradient is not finite on one rank", where="ZeroAdamW", answer="the step is skipped on all ranks, and counted"
)
@on_ranks(*worlds(3, slow=(0,)))
def test_nothing_changes(case, value):
    """A skipped step changes nothing: two good steps, two bad ones, two good ones."""
    run, name = case
    trainer, culprit = Compared(run), min(world() - 1, 1)
    for step in range(6):
        if step in (2, 3):
            before = snapshot(trainer)
            poison(trainer, step, name, value, culprit)
            if run.max_norm is not None:
                assert not trainer.optimizer.clip_grad_norm_(1.0).isfinite()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            casts.assert_same_bytes(snapshot(trainer), before, f"rank {trainer.rank}, skipped step {step}")
            trainer.reference.skipped += 1
            continue
        trainer.step(step)
        if run.config.deterministic or run.config.grad_wire:
            trainer.follow(step)
            trainer.check(f"step {step}")
    assert trainer.optimizer.skipped_steps == 2
    assert float(trainer.optimizer.state_dict()["optim"]["state"]["norm"]["step"]) == 4


@on_ranks(0, 2)
def test_what_is_new_is_logged_when_read():
    """Rank 0 logs new skipped steps once, when they are read and not before."""
    trainer = Trainer(Run())
    with logged() as said:
        assert trainer.optimizer.skipped_steps == 0
        for step in range(2):
            poison(trainer, step, "nv", float("nan"), world() - 1)
            trainer.optimizer.step()
        assert not said
        assert trainer.optimizer.skipped_steps == 2
        assert trainer.optimizer.skipped_steps == 2
    assert said == ["2 steps skipped for non-finite gradients, 2 in all"] * (trainer.rank == 0)


def warnings_of_rows(rows: list[int], good: tuple[float, ...] = (1.0,)) -> list[str]:
    """Return the warnings of a rank that skips that many steps in a row, each row followed by good steps."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = ZeroAdamW([("bias", weight)])
    with logged() as said:
        for skipped in rows:
            for value in [float("nan")] * skipped + [*good]:
                weight.grad = torch.full_like(weight, value)
                optimizer.step()
    return said


def test_rows_of_skipped_steps_are_told(ranks):
    assert warnings_of_rows([19, 19]) == []
    (long,) = warnings_of_rows([21])
    # On a CPU the count is there at once.
    assert warnings_of_rows([20], good=()) == [long]
    assert long.startswith("the last 20 steps were all skipped")
    first, rank_1 = ranks(2)(warnings_of_rows, [201])
    assert [text.split(" were")[0] for text in first] == ["the last 20 steps", "the last 200 steps"]
    assert rank_1 == []
