"""A step calls few functions, in few files: what a step does is read in this order too."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import zerocast
from tests.fsdp2.test_host_work import calls_of_zerocast

# Calls of functions of zerocast in a step of one bucket of weights and one of biases, and the files that they are in. With
# every gain these bounds come down.
MOST_CALLS = {"fp8_current": 150, "fp8_block": 144, "nvfp4": 150, "fp8_delayed": 164}
MOST_FILES = 31


def step_of(fmt: str) -> partial[object]:
    """A step after others, with gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    zerocast.quantize_(model, {"*.weight": fmt})
    optimizer = zerocast.ZeroAdamW(model.named_parameters(), lr=1e-3)
    for step in range(3):
        if step:
            optimizer.step()
            optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
    return partial(optimizer.step)


@pytest.mark.parametrize("fmt", MOST_CALLS)
def test_a_step_makes_few_calls(fmt: str) -> None:
    step = step_of(fmt)
    # Other tests of the process may have registered hooks on all optimizers, which count too.
    with (
        mock.patch.dict(_global_optimizer_pre_hooks, clear=True),
        mock.patch.dict(_global_optimizer_post_hooks, clear=True),
    ):
        by_file = calls_of_zerocast(step)
    assert by_file.total() <= MOST_CALLS[fmt] and len(by_file) <= MOST_FILES, by_file
