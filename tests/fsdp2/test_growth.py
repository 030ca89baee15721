"""Thousands of FSDP2 steps leave nothing behind."""

from typing import Any

import pytest
import torch

from tests import growth
from tests.fsdp2 import models
from tests.fsdp2.models import FEW, Net
from tests.workers import Ranks
from zerocast.fsdp2 import FusedAdamW

WARM = 20
MOST_BYTES = 2**11  # a step
OPTIMIZERS: dict[str, Any] = {"AdamW": torch.optim.AdamW, "FusedAdamW": FusedAdamW}


def steps(optimizer: str, count: int) -> tuple[dict[str, tuple[int, int]], float]:
    """What has grown after so many steps, and bytes a step."""
    model: Any = models.sharded(Net((*FEW, "mxfp8"), 64, 96))
    made = OPTIMIZERS[optimizer](model.parameters(), lr=1e-3)
    models.train(model, made, range(WARM), 64)
    before, memory = growth.held(), growth.resident()
    models.train(model, made, range(WARM, WARM + count), 64)
    return growth.grown(before, growth.held()), (growth.resident() - memory) / count


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.notices(
    "thousands of steps", where="FSDP2", answer="memory, objects, threads and files stay what they were"
)
def test_steps(ranks: Ranks, optimizer: str) -> None:
    for grown, used in ranks(2)(steps, optimizer, 2000, timeout=1800.0):
        assert grown == {}
        assert used < MOST_BYTES, used
