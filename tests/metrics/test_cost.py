"""What measuring costs where it was promised to be little: in the GPT example, at the default of every 100th step."""

import pytest
import torch
import torch.distributed as dist

from examples.gpt_pretrain.config import TrainConfig
from examples.gpt_pretrain.world import World
from tests.benchmarks import metrics_cost
from tests.workers import Ranks


def seconds() -> dict[str, float]:
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return metrics_cost.measure(TrainConfig(format="nvfp4"), world, rounds=8)


@pytest.mark.slow
def test_measuring_every_hundredth_step_costs_less_than_two_percent(ranks: Ranks) -> None:
    for found in ranks(2)(seconds, timeout=200.0):
        assert found["measuring"] - found["without"] < 0.02 * 100 * found["without"], found
