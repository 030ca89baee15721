"""Masters, moments, delayed scales and weight bytes after each step: equal to the undistributed update, for any number of ranks."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import casts
from tests.dispatched import Dispatched
from tests.optim.probe import BF16, FP16, FP32, MIXED, PLAIN, Spec
from tests.optim.runs import ADAM, DETERMINISTIC, EIGHT_BIT_MOMENTS, OVERLAP, Run, Trainer, check, snapshot
from tests.optim.test_muon import SMALL
from tests.selection import some, worlds
from tests.workers import on_ranks
from zerocast import ZeroConfig, get_format

ONE_BUCKET = ZeroConfig(deterministic=True)
TINY_BUCKETS = ZeroConfig(bucket_size=1, deterministic=True)
FP32_GRADIENTS = ZeroConfig(bucket_size=3000, deterministic=True, grad_dtype=FP32)
BF16_MOMENTS = ZeroConfig(bucket_size=3000, deterministic=True, moment_dtype=BF16)
BF16_GRADIENTS = ZeroConfig(bucket_size=3000, deterministic=True, grad_dtype=BF16)
FP8_WIRE = ZeroConfig(bucket_size=4096, grad_wire="fp8_1x128")  # adds in rank order without `deterministic`


class Faint(Spec):
    """A parameter with groups whose gradients are zeros, whose second moments are subnormal numbers, and are 0."""

    def gradient(self, step: int, rank: int) -> Tensor | None:
        gradient = super().gradient(step, rank)
        assert gradient is not None
        sizes = torch.ones(self.shape[-1])
        for start, size in ((128, 0.0), (256, 1e-20), (384, 1e-32)):
            sizes[start : start + 128] = size
        return (gradient.float() * sizes).to(self.dtype)


RUNS = {
    "plain": Run(),
    "long": Run(steps=40, max_norm=0.5, schedule=True),
    "clip": Run(max_norm=0.02),
    "no clip needed": Run(max_norm=1e6),
    "schedule": Run(schedule=True),
    "one bucket": Run(config=ONE_BUCKET),
    "tiny buckets": Run(config=TINY_BUCKETS, max_norm=0.1),
    "fp32 gradients": Run(config=FP32_GRADIENTS, max_norm=0.1),
    "bf16 gradients": Run(config=BF16_GRADIENTS, max_norm=0.1),
    "bf16 moments": Run(config=BF16_MOMENTS, max_norm=0.1),
    "8-bit moments": Run(config=EIGHT_BIT_MOMENTS, max_norm=0.1, steps=12),
    "8-bit moments, accumulated": Run(config=EIGHT_BIT_MOMENTS, accumulate=3, stage=1),
    # ranks 1 and 2 own no piece of a weight
    "8-bit moments, one element": Run(
        specs=(Spec("one", (1,), dtype=FP32),), options=(ADAM,), config=EIGHT_BIT_MOMENTS
    ),
    "8-bit moments, faint gradients": Run(
        specs=(
            Faint("plain", (6, 700), dtype=FP32),
            Faint("codes", (32, 592), "nvfp4"),
            Faint("vector", (700,), dtype=FP32),
        ),
        options=(ADAM,),
        config=EIGHT_BIT_MOMENTS,
    ),
    # taller than blocks, so that block rows are cut and others are not
    "8-bit moments, codes in the same pass": Run(
        specs=(
            Spec("blocks", (400, 96), "fp8_block"),
            Spec("tiles", (384, 160), "mxfp4"),
            Spec("squares", (160, 96), "mxfp8:block=32x32"),
            Spec("experts", (3, 160, 64), "mxfp8:block=32x32"),
        ),
        options=(ADAM,),
        config=EIGHT_BIT_MOMENTS,
        assign=True,
    ),
    "fp8 wire": Run(config=FP8_WIRE, max_norm=0.1),
    "fp8 wire, fp32 gradients": Run(config=ZeroConfig(grad_wire="fp8_1x128", grad_dtype=FP32), stage=1),
    "fp8 wire, deterministic": Run(config=dataclasses.replace(FP8_WIRE, deterministic=True, bucket_size=1)),
    # ranks 1 and 2 own padding alone
    "fp8 wire, one element": Run(specs=(Spec("one", (1,), dtype=FP32),), options=(ADAM,), config=FP8_WIRE),
    "stage 1": Run(stage=1, max_norm=0.1),
    "assigned gradients": Run(assign=True, max_norm=0.1),
    "assigned fp32 gradients": Run(assign=True, config=FP32_GRADIENTS, stage=1),
    "overlap": Run(config=OVERLAP, max_norm=0.1),
    "experts": Run(
        specs=(
            Spec("experts", (4, 32, 48), "nvfp4"),
            Spec("blocks", (3, 128, 40), "fp8_block"),
            Spec("mx", (2, 32, 64), "mxfp8", FP16),
            Spec("tiles", (2, 128, 96), "mxfp4"),
            Spec("groups", (3, 37, 96), "int4"),
            Spec("convolution", (8, 3, 3, 3), dtype=FP32),
        ),
        options=(ADAM,),
        assign=True,
    ),
    "one element": Run(specs=(Spec("one", (1,), dtype=FP32),), options=(ADAM,)),
    "zero betas": Run(options=({**ADAM, "betas": (0.0, 0.0)}, {**ADAM, "lr": 0.0})),
}


OVER_RANKS = (
    *("plain", "clip", "tiny buckets", "bf16 moments", "stage 1", "assigned gradients", "overlap", "experts"),
    *("8-bit moments", "8-bit moments, one element", "8-bit moments, faint gradients"),
    *("8-bit moments, codes in the same pass", "fp8 wire", "fp8 wire, deterministic", "fp8 wire, one element"),
)


@pytest.mark.shows(host="ZeroAdamW", parallel="data", formats=lambda run: [spec.fmt for spec in run.specs])
@pytest.mark.parametrize("run", some(RUNS, *OVER_RANKS))
@on_ranks(*worlds(3, slow=(1, 2, 4)))
def test_bits_of_the_undistributed_update(run):
    check(run)


@pytest.mark.parametrize("run", some(RUNS, "plain", *({*RUNS} - {*OVER_RANKS})))
def test_one_process_without_a_process_group(run):
    check(run)


@pytest.mark.parametrize("grad_dtype", [None, FP32], ids=str)
@on_ranks(2)
def test_two_ranks_add_alike_in_any_library(grad_dtype):
    """A sum of two is the same in any order; in FP32 its half is exact."""
    specs = tuple(spec for spec in MIXED if grad_dtype is FP32 or spec.dtype is FP32)
    config = ZeroConfig(bucket_size=4096, grad_dtype=grad_dtype)
    check(Run(specs=specs, config=config, max_norm=0.1))


@pytest.mark.slow
@on_ranks(1, 2, 3, 4, 5, timeout=600.0)
def test_hundreds_of_steps():
    check(Run(steps=300, max_norm=0.05, schedule=True, config=OVERLAP))


@pytest.mark.parametrize("config", [DETERMINISTIC, FP8_WIRE], ids=["as it lies", "fp8 wire"])
def test_every_backend_gives_the_bits(backend, config):
    config = dataclasses.replace(config, backend=backend)
    check(Run(config=config, max_norm=0.1))


@pytest.mark.parametrize(("config", "adam"), [(DETERMINISTIC, "adam"), (EIGHT_BIT_MOMENTS, "adam_8bit")], ids=str)
def test_masters_are_updated_and_measured_in_one_pass(config, adam):
    """An op a format and dtype: Adam with amaxes and codes where scales are local, with amaxes for the rest."""
    trainer = Trainer(Run(config=config))
    trainer.step(0)
    trainer.backward(1)
    with Dispatched() as ops:
        trainer.optimizer.step()
    kinds = {(spec.fmt, spec.dtype) for spec in MIXED if spec.fmt != PLAIN}
    local = {(fmt, dtype) for fmt, dtype in kinds if get_format(fmt).casts_in_one_pass}
    measured = len(kinds - local) + len({spec.dtype for spec in MIXED if spec.fmt == PLAIN})
    stages = {f"{adam}_cast": len(local), "adam_amax" if adam == "adam" else adam: measured, "partial_cast": measured}
    assert local and Counter(stage for stage in ops.stages if stage.startswith(("adam", "partial"))) == stages


def test_threads_do_not_change_the_bits():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        check(Run(max_norm=0.1))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("run", [Run(), SMALL], ids=["ZeroAdamW", "ZeroMuon"])
def test_a_compiled_step_is_the_step(run: Run) -> None:
    """By torch.compile of `step`, which torch's own optimizers allow: ours runs between graphs."""
    eager, compiled = Trainer(run), Trainer(run)
    step: Any = torch.compile(compiled.optimizer.step, backend="eager")
    for number in range(3):
        eager.backward(number)
        eager.optimizer.step()
        compiled.backward(number)
        step()
        casts.assert_same_bytes(snapshot(compiled), snapshot(eager), f"step {number}")
