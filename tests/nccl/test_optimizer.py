"""ZeroAdamW over NCCL: the bits of the undistributed reference after every step, and exact checkpoints."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from tests.cast import test_shared_amax
from tests.devices import gpu_params, gpus
from tests.optim import test_accumulation, test_muon
from tests.optim.probe import MIXED
from tests.optim.runs import ADAM, DETERMINISTIC, Compared, Run, Trainer, check
from tests.optim.test_update import WHOLE
from zerocast import ZeroConfig

pytestmark = gpus(2)
BACKENDS = ["reference", *gpu_params()]
CASE_SECONDS = 180.0
RUNS = {
    "clip and schedule": Run(MIXED, schedule=True, max_norm=0.1),
    "gradients put on parameters": Run(MIXED, assign=True),
    "overlap": Run(MIXED, config=dataclasses.replace(DETERMINISTIC, overlap_all_gather=True)),
    "fp32 gradients": Run(MIXED, config=dataclasses.replace(DETERMINISTIC, grad_dtype=torch.float32)),
    "fp8 wire": Run(MIXED, config=ZeroConfig(bucket_size=4096, grad_wire="fp8_1x128"), max_norm=0.1),
    "stage 1": Run(MIXED, stage=1, accumulate=2),
    "gathered scales": Run(
        specs=WHOLE, options=(ADAM,), steps=3, config=ZeroConfig(bucket_size=40_000, deterministic=True)
    ),
    "small buckets": Run(MIXED, config=ZeroConfig(bucket_size=1, deterministic=True), steps=3),
    "Muon": dataclasses.replace(test_muon.RUN, max_norm=0.1),
    "Muon, a matrix a round": dataclasses.replace(
        test_muon.RUN, config=ZeroConfig(bucket_size=1, deterministic=True), accumulate=2
    ),
    "Muon, ranks without a matrix": dataclasses.replace(
        test_muon.RUN, specs=test_muon.SPECS[:3] + test_muon.SPECS[5:6]
    ),
}


@pytest.mark.shows(host="ZeroAdamW", parallel="data", formats=lambda run: [spec.fmt for spec in run.specs], ranks=2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_every_step_gives_the_bits_of_the_reference(gpu_ranks, run, backend):
    """Masters, moments, scales and live bytes are the reference's, to the bit."""
    config = dataclasses.replace(run.config, backend=backend)
    on_gpus = dataclasses.replace(run, config=config, device="cuda")
    gpu_ranks(2)(check, on_gpus, timeout=CASE_SECONDS)


@pytest.mark.parametrize("fmt", test_shared_amax.SHARING)
def test_fused_weights_share_an_amax(gpu_ranks, fmt):
    """The first cast is the reference's on the CPU, and later ones verify, under FSDP2 too."""
    gpu_ranks(2)(test_shared_amax.both, fmt, "cuda", timeout=CASE_SECONDS)


def without_gradients_before_no_sync(passes: Callable[[Trainer], None], count: int) -> None:
    compared = Compared(dataclasses.replace(test_accumulation.BY_TURNS, accumulate=count, no_sync=False, device="cuda"))
    passes(compared)
    compared.optimizer.step()
    compared.follow(0)
    compared.check("stepped")


@pytest.mark.parametrize(
    ("passes", "count"),
    [(test_accumulation.synchronised_then_not, 2), (test_accumulation.synchronised_around, 3)],
    ids=["synchronised", "around"],
)
def test_a_rank_without_gradients_before_no_sync(gpu_ranks, passes, count):
    gpu_ranks(2)(without_gradients_before_no_sync, passes, count, timeout=CASE_SECONDS)


def waits_after_no_sync() -> bool:
    """Return whether the host waits, in a step after no_sync, for what the GPU does before that step."""
    trainer = Trainer(Run(MIXED, accumulate=2, device="cuda"))
    trainer.train(range(3))
    trainer.backward(3)
    torch.cuda._sleep(6_000_000_000)  # cycles, about three seconds
    slept = torch.cuda.Event()
    slept.record()
    trainer.optimizer.step()
    waited = slept.query()
    torch.cuda.synchronize()
    return waited


def test_a_step_after_no_sync_does_not_wait(gpu_ranks):
    assert gpu_ranks(2)(waits_after_no_sync) == [False, False]
