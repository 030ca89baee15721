"""The example of rollouts: the generator has the trainer's bits after every step, and others where it rounds again."""

import subprocess
import sys

import pytest
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed: make readers")

from examples.rollout import generator, trainer
from examples.rollout.config import RolloutConfig
from tests.workers import Ranks


def both(config: RolloutConfig) -> list[trainer.Step]:
    """Trainer and generator as the two ranks of a case."""
    if dist.get_rank() == generator.GENERATOR:
        generator.run(config)
        return []
    return trainer.run(config)


@pytest.mark.parametrize("fmt", ["fp8_block", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_the_same_bits(ranks: Ranks, fmt: str) -> None:
    steps, _ = ranks(2)(both, RolloutConfig(format=fmt, steps=3))
    assert all(step.is_equal and step.kl == 0.0 for step in steps)
    assert 0 < steps[1].nbytes < steps[0].nbytes / 2
    rounded, _ = ranks(2)(both, RolloutConfig(format=fmt, steps=2, requantize=True))
    assert all(step.kl > 1e-5 and not step.is_equal for step in rounded)


@pytest.mark.slow
def test_rewards_grow_and_both_runs_are_shown() -> None:
    command = [sys.executable, "-m", "examples.rollout.run", "--steps", "41"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280).stdout
    own, control = shown.split("bf16 weights, quantized again")
    rewards = [float(line.split()[1]) for line in own.splitlines() if line[:5].strip().isdigit()]
    assert rewards[-1] > rewards[0] + 0.1
    assert own.count("0.00e+00") >= 5 and "0.00e+00" not in control
