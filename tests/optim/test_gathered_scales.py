"""mxfp8 whose scales are gathered with its codes: the bits of the undistributed cast on any ranks.

What is reduced and gathered for them is asked in `tests/cli/test_plan.py`.
"""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.optim.probe import FP16, FP32, Spec
from tests.optim.runs import ADAM, MIXED, Run, Trainer, check
from tests.selection import some, worlds
from tests.workers import error_of, on_ranks
from zerocast import CastPlan, QuantizedWeight, ZeroConfig, verify

# rows and columns in multiples of 128: nothing is padded, and the scales of every span are its part of the buffers
WHOLE = (
    Spec("even", (128, 128), "mxfp8"),
    Spec("wide", (128, 384), "mxfp8"),
    Spec("tall", (384, 128), "mxfp8", FP16),
    Spec("even_fp32", (256, 128), "mxfp8", FP32),
    Spec("padded", (64, 96), "mxfp8"),
    Spec("never", (128, 256), "mxfp8", used="never"),
)
RUNS = {
    "one bucket": Run(specs=WHOLE, config=ZeroConfig(deterministic=True), options=(ADAM,), steps=3),
    "small buckets": Run(specs=WHOLE, options=(ADAM,), steps=3, max_norm=0.1),
    "tiny buckets": Run(specs=WHOLE, config=ZeroConfig(bucket_size=1, deterministic=True), options=(ADAM,), steps=3),
    "overlap": Run(
        specs=WHOLE,
        config=ZeroConfig(bucket_size=40_000, deterministic=True, overlap_all_gather=True),
        options=(ADAM,),
        steps=3,
    ),
    "experts": Run(specs=(Spec("experts", (2, 128, 128), "mxfp8"),), options=(ADAM,), steps=2, assign=True),
    "among others": Run(specs=(*MIXED, *WHOLE), steps=3),
}


@pytest.mark.parametrize("run", some(RUNS, "one bucket", "overlap", "experts", "among others"))
@on_ranks(*worlds(0, 3, slow=(1, 2, 4, 5)))
def test_bits_of_the_undistributed_update(run: Run) -> None:
    check(run)


@on_ranks(2)
def test_wrong_cuts_raise_on_all_ranks() -> None:
    rank, told = dist.get_rank(), []
    weight, half = QuantizedWeight.empty((128, 128), "mxfp8"), 64 * 128
    padded = QuantizedWeight.empty((64, 96), "mxfp8")
    tries: list[tuple[QuantizedWeight, int, Any]] = [
        (weight, half, range(128, 128 * 128, half)),
        (weight, half, range(half, 128 * 128, half // (1 + rank))),
        (weight, half, range(half + 16, 128 * 128, half)),
        (padded, 32 * 96, range(32 * 96, 64 * 96, 32 * 96)),
    ]
    for one, part, cuts in tries:
        plan = functools.partial(CastPlan, [one], [torch.ones(part)], [part * rank], scale_cuts=[cuts])
        told.append(error_of(plan))
    elsewhere, different, inside, padded = told
    assert (
        "rank 0: weight 0 (mxfp8 (128, 128) torch.bfloat16): elements [0, 8192) are not between the boundaries"
        in elsewhere
    )
    assert "cut at range(8192, 16384, 8192) on rank 0 and mxfp8" in different
    assert "these scales cannot be gathered in parts that end at range(8208" in inside
    assert "these scales cannot be gathered in parts" in padded


@on_ranks(2)
def test_moved_scales() -> None:
    """Scale buffers that somebody moved are brought back before the next gather writes them."""
    trainer = Trainer(Run(specs=WHOLE, options=(ADAM,)))
    trainer.step(0)
    for name in ("even", "tall"):
        weight = trainer.probe.get_parameter(name)
        weight.state.move_to({"rowwise_scale_inv": torch.empty_like(weight.rowwise_scale_inv)})
    trainer.step(1)
    assert verify(trainer.optimizer).ok
