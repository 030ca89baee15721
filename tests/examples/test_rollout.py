"""The example of rollouts: the generator has the trainer's bits after every step, and others where it rounds again."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed: make readers")

from examples.rollout import generator, run, trainer
from examples.rollout.config import RolloutConfig
from tests.serve.test_vllm import VLLM
from tests.workers import Ranks

WITHOUT = Path("without vLLM")


def both(config: RolloutConfig) -> list[trainer.Step]:
    """Run trainer and generator as the two ranks of a case."""
    if dist.get_rank() == generator.GENERATOR:
        generator.run(config)
        return []
    return trainer.run(config, generator.Peer, dist.new_group([generator.TRAINER], use_local_synchronization=True))


@pytest.mark.parametrize("fmt", ["fp8_block", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_the_same_bits(ranks: Ranks, fmt: str) -> None:
    steps, _ = ranks(2)(both, RolloutConfig(format=fmt, steps=3))
    assert all(step.is_equal and step.kl["same pass"] == step.gap == 0.0 for step in steps)
    assert 0 < steps[1].nbytes < steps[0].nbytes / 2
    rounded, _ = ranks(2)(both, RolloutConfig(format=fmt, steps=2, requantize=True))
    assert all(step.kl["same pass"] > 1e-5 and step.gap and not step.is_equal for step in rounded)


@pytest.mark.slow
def test_rewards_grow_and_both_runs_are_shown(tmp_path: Path) -> None:
    options = ["--steps", "41", "--vllm", str(WITHOUT), "--plot", str(tmp_path / "plot.png")]
    command = [sys.executable, "-m", "examples.rollout.run", *options]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280).stdout
    assert shown.startswith("transformers generate, since there is no")
    own, control = shown.split("bf16 weights, quantized again")
    rewards = [float(line.split()[1]) for line in own.splitlines() if line[:5].strip().isdigit()]
    assert rewards[-1] > rewards[0] + 0.1
    assert own.count("0.00e+00") >= 5 and "0.00e+00" not in control
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not VLLM, reason="no environment has vLLM: make vllm, or ZEROCAST_VLLM names its Python")
@pytest.mark.parametrize("fmt", ["fp8_block", "nvfp4"])
def test_vllm_generates(fmt: str) -> None:
    """A server over HTTP has the trainer's bytes by refits: its probabilities are far closer than those of weights that are
    quantized again.
    """
    config = RolloutConfig(format=fmt, steps=3, vllm=Path(VLLM))
    own, control = run.run(config), run.run(RolloutConfig(format=fmt, steps=3, vllm=Path(VLLM), requantize=True))
    assert 0 < own[2].nbytes < own[0].nbytes / 2 and control[2].nbytes == control[0].nbytes
    for step, other in zip(own, control, strict=True):
        (kl,), (again,) = step.kl.values(), other.kl.values()
        assert 0 <= kl < again / 10, step
    assert list(control[0].kl) == ["vLLM"]
    # On a CPU, vLLM multiplies only the first of these formats, if it has AMX.
    products = {"vLLM, stand-in for products", *(["vLLM"] if fmt == "fp8_block" else [])}
    assert {*own[0].kl} <= products
