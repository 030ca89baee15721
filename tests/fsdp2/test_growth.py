"""Thousands of FSDP2 steps leave nothing behind, nor does a model that is dropped."""

import itertools
import weakref
from typing import Any

import pytest
import torch

from tests import growth
from tests.fsdp2 import models
from tests.fsdp2.models import FEW, Net
from tests.workers import Ranks, on_ranks
from zerocast import verify
from zerocast.fsdp2 import TrainingState
from zerocast.fsdp2.prepare import managers_of

WARM = 800  # steps, in which the process takes a megabyte more, and none after them
MOST_BYTES = 2**9  # a step


def steps(optimizer: str, count: int) -> tuple[dict[str, tuple[int, int]], float]:
    """What has grown after so many steps, and bytes a step."""
    model: Any = models.sharded(Net((*FEW, "mxfp8"), 64, 96))
    made = models.OPTIMIZERS[optimizer](model)
    models.train(model, made, range(WARM), 64)
    before, memory = growth.held(), growth.resident()
    models.train(model, made, range(WARM, WARM + count), 64)
    return growth.grown(before, growth.held()), (growth.resident() - memory) / count


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("optimizer", models.OPTIMIZERS)
def test_steps(ranks: Ranks, optimizer: str) -> None:
    for grown, used in ranks(2)(steps, optimizer, 2000, timeout=1800.0):
        assert grown == {}
        assert used < MOST_BYTES, used


def trained_and_dropped(optimizer: str, assigns: bool, **options: Any) -> list[weakref.ref[Any]]:
    """A model, gone when this returns; with a state of it, a verification and perhaps a load that replaces masters. Its weights."""
    model: Any = models.sharded(Net((*FEW, "mxfp8"), 64, 96), **options)
    made = models.OPTIMIZERS[optimizer](model)
    models.train(model, made, range(2), 64)
    TrainingState(model, made).state_dict()
    verify(model)
    if assigns:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with torch.no_grad():
        model(models.batch(0, 64))
    return [weakref.ref(weight) for manager in managers_of(model) for weight in manager.weights]


@pytest.mark.parametrize("optimizer", ["FusedAdamW", models.slow("AdamW"), models.slow("8-bit moments")])
@on_ranks(2)
def test_a_model_that_is_dropped_is_freed(optimizer: str) -> None:
    """All of it: masters, moments, gathered bytes. No cycle goes through what the garbage
    collector does not look into.
    """
    found = []
    for assigns, reshards in ((False, True), (False, False), (True, True)):
        counts = []
        for _ in range(3):
            weights = trained_and_dropped(optimizer, assigns, reshard_after_forward=reshards)
            counts.append(growth.held())  # after one collection: the memory of the next model waits for no second one
            assert len(weights) > len(FEW)
            assert [weight().name for weight in weights if weight()] == []
        grown = [growth.grown(*pair) for pair in itertools.pairwise(counts)]
        found.append(sorted(grown[0].keys() & grown[1].keys()))
    assert found == [[]] * 3
