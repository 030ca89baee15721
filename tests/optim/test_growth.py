"""Optimizers that are built, used and dropped leave nothing behind, on their model or in the process."""

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerocast
from tests import growth
from tests.workers import Ranks
from zerocast import Recipe, ZeroAdamW

WARM = 4
FORMATS = Recipe({"0.weight": "nvfp4", "1.weight": "fp8_delayed", "2.weight": "mxfp8"})
MOST_BYTES = 2**17  # an optimizer, where a leaked one would be 2**19 and more


def model() -> nn.Sequential:
    """Three formats and biases; masters and moments of 200 KB."""
    made = nn.Sequential(*(nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(4)))
    zerocast.quantize_(made, FORMATS)
    return made


def train(made: nn.Module, *optimizers: ZeroAdamW) -> None:
    for optimizer in optimizers:
        made(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


class OneModel:
    """Each optimizer takes over the model from the one before."""

    def __init__(self) -> None:
        self.model = model()

    def build(self) -> None:
        train(self.model, ZeroAdamW(self.model.named_parameters()))


class NewModels(OneModel):
    """Each optimizer goes with its model."""

    def build(self) -> None:
        self.model = model()
        super().build()


class Beside(OneModel):
    """Another optimizer stays, so that each has a process group of its own."""

    def __init__(self) -> None:
        self.model = model()
        self.kept = ZeroAdamW(self.model[:2].named_parameters())

    def build(self) -> None:
        train(self.model, ZeroAdamW(self.model[2:].named_parameters()), self.kept)


class InCycles(OneModel):
    """Only a garbage collection lets go of them."""

    def build(self) -> None:
        optimizer: Any = ZeroAdamW(self.model.named_parameters())
        optimizer.itself = optimizer
        train(self.model, optimizer)


LIVES: dict[str, Callable[[], OneModel]] = {life.__name__: life for life in (OneModel, NewModels, Beside, InCycles)}


def build_and_drop(life: str, count: int) -> tuple[dict[str, tuple[int, int]], float, set[int]]:
    """What has grown after so many, the bytes an optimizer, and the hooks on each parameter."""
    logger = logging.getLogger("zerocast")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return _build_and_drop(life, count)
    finally:
        logger.setLevel(level)


def _build_and_drop(life: str, count: int) -> tuple[dict[str, tuple[int, int]], float, set[int]]:
    lives = LIVES[life]()
    for _ in range(WARM):
        lives.build()
    before, memory = growth.held(), growth.resident()
    for _ in range(count):
        lives.build()
    after = growth.held()
    for _ in range(3):  # what another thread was just letting go of is gone then, what is left behind is not
        lives.build()
        after &= growth.held()
    hooks = {len(parameter._post_accumulate_grad_hooks or ()) for parameter in lives.model.parameters()}
    used = (growth.resident() - memory) / (count + 3)
    del lives
    gc.collect()
    return growth.grown(before, after), used, hooks


SHORT = (("OneModel", 1, 3), ("Beside", 2, 3))
LONG = [pytest.param(life, world, 200, marks=pytest.mark.slow) for life in LIVES for world in (1, 2)]


@pytest.mark.parametrize(("life", "world", "count"), [*SHORT, *LONG])
def test_optimizers_that_are_dropped(ranks: Ranks, life: str, world: int, count: int) -> None:
    for grown, used, hooks in ranks(world)(build_and_drop, life, count, timeout=600.0):
        assert grown == {}
        assert used < MOST_BYTES or count < 200, used
        assert hooks <= {0, 1}
