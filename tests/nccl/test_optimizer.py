"""ZeroAdamW over NCCL: the bits of the undistributed reference after every step, and exact checkpoints."""

import dataclasses

import pytest
import torch

from tests.devices import gpu_params, gpus
from tests.optim import test_resume
from tests.optim.runs import DETERMINISTIC, Run, check
from zerocast import ZeroConfig

pytestmark = gpus(2)
BACKENDS = ["reference", *gpu_params()]
CASE_SECONDS = 180.0
RUNS = {
    "clip and schedule": Run(schedule=True, max_norm=0.1),
    "gradients put on parameters": Run(assign=True),
    "overlap": Run(config=dataclasses.replace(DETERMINISTIC, overlap_all_gather=True)),
    "fp32 gradients": Run(config=dataclasses.replace(DETERMINISTIC, grad_dtype=torch.float32)),
    "stage 1": Run(stage=1, accumulate=2),
    "small buckets": Run(config=ZeroConfig(bucket_size=1, deterministic=True), steps=3),
}


@pytest.mark.shows(host="ZeroAdamW", parallel="data", formats=lambda run: [spec.fmt for spec in run.specs], ranks=2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_every_step_gives_the_bits_of_the_reference(gpu_ranks, run, backend):
    """Masters, moments, scales and live bytes, which are those of `reference.quantize` of the whole masters."""
    config = dataclasses.replace(run.config, backend=backend)
    on_gpus = dataclasses.replace(run, config=config, device="cuda")
    assert gpu_ranks(2)(check, on_gpus, timeout=CASE_SECONDS) == [0, 0]


@pytest.mark.parametrize("by_hand", [True, False], ids=["torch.distributed.checkpoint", "zerocast.optim"])
@pytest.mark.parametrize("run", test_resume.RUNS.values(), ids=test_resume.RUNS)
def test_resume_is_exact(gpu_ranks, tmp_path, run, by_hand):
    on_gpus = dataclasses.replace(run, device="cuda")
    gpu_ranks(2)(test_resume.interrupted, on_gpus, str(tmp_path / "checkpoint"), by_hand, timeout=CASE_SECONDS)


@pytest.mark.parametrize("worlds", [(2, 1), (1, 2), (2, 1, 2)], ids=str)
def test_other_numbers_of_ranks(gpu_ranks, tmp_path, worlds):
    """2 -> 1: loaded masters, moments, step, history and bytes are equal, and so is a step from there."""
    source = None
    for index, world in enumerate(worlds):
        target = str(tmp_path / f"checkpoint {index}")
        config = ZeroConfig(bucket_size=(4096, 1, 10_000)[index], deterministic=True)
        steps = range(3 * index, 3 * index + 3)
        gpu_ranks(world)(test_resume.hop, config, steps, source, target, "cuda", timeout=CASE_SECONDS)
        source = target
