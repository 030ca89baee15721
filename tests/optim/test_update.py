"""Masters, moments, delayed scales and weight bytes after each step: equal to the undistributed update, for any number of ranks."""

import dataclasses
import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import casts
from tests.observed import Dispatched
from tests.optim.probe import BF16, FP16, FP32, MIXED, PLAIN, Spec
from tests.optim.runs import ADAM, DETERMINISTIC, EIGHT_BIT_MOMENTS, OVERLAP, TWO_GROUPS, Run, Trainer, check, snapshot
from tests.optim.test_muon import SMALL
from tests.optim.undistributed import Undistributed, mean
from tests.selection import some, worlds
from tests.workers import error_of, on_ranks
from zerocast import CastPlan, QuantizedWeight, ZeroConfig, get_format, verify

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
    "plain": Run(MIXED, steps=6),
    "long": Run(steps=40, max_norm=0.5, schedule=True),
    "clip": Run(max_norm=0.02),
    "no clip needed": Run(max_norm=1e6),
    "schedule": Run(schedule=True),
    "one bucket": Run(config=ONE_BUCKET),
    "tiny buckets": Run(config=TINY_BUCKETS, max_norm=0.1),
    "fp32 gradients": Run(config=FP32_GRADIENTS, max_norm=0.1),
    "bf16 gradients": Run(config=BF16_GRADIENTS, max_norm=0.1),
    "bf16 moments": Run(config=BF16_MOMENTS, max_norm=0.1),
    "8-bit moments": Run(MIXED, config=EIGHT_BIT_MOMENTS, max_norm=0.1),
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
            Spec("apart", (3, 96, 64), "fp8_block"),
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
    "overlap": Run(MIXED, config=OVERLAP, max_norm=0.1),
    "experts": Run(
        specs=(
            Spec("experts", (4, 32, 48), "nvfp4"),
            Spec("blocks", (3, 128, 40), "fp8_block"),
            # Blocks would span two of these experts, which are stored one after another.
            Spec("apart", (3, 96, 64), "mxfp4"),
            Spec("mx", (2, 32, 64), "mxfp8", FP16),
            Spec("tiles", (2, 128, 96), "mxfp4"),
            Spec("groups", (3, 37, 96), "int4"),
            Spec("convolution", (8, 3, 3, 3), dtype=FP32),
        ),
        options=(ADAM,),
        assign=True,
    ),
    "gathered scales, one bucket": Run(specs=WHOLE, config=ONE_BUCKET, options=(ADAM,), steps=3),
    "gathered scales, small buckets": Run(specs=WHOLE, options=(ADAM,), steps=3, max_norm=0.1),
    "gathered scales, tiny buckets": Run(specs=WHOLE, config=TINY_BUCKETS, options=(ADAM,), steps=3),
    "gathered scales, overlap": Run(
        specs=WHOLE, config=dataclasses.replace(OVERLAP, bucket_size=40_000), options=(ADAM,), steps=3
    ),
    "gathered scales of experts": Run(
        (Spec("experts", (2, 128, 128), "mxfp8"),), options=(ADAM,), steps=2, assign=True
    ),
    "gathered scales among others": Run(specs=(*MIXED, *WHOLE), steps=3),
    "no_sync": Run(accumulate=3, max_norm=0.1),
    "no_sync, fp32 gradients": Run(accumulate=3, config=FP32_GRADIENTS),
    "no_sync, bf16 gradients": Run(accumulate=2, config=BF16_GRADIENTS),
    "no_sync, stage 1": Run(accumulate=3, stage=1, max_norm=0.1),
    "no_sync, fp8 wire": Run(accumulate=3, config=FP8_WIRE, max_norm=0.1),
    "every pass reduced": Run(accumulate=3, no_sync=False, max_norm=0.1),
    "every pass reduced, fp32 gradients": Run(accumulate=3, no_sync=False, config=FP32_GRADIENTS),
    "every pass reduced, fp8 wire": Run(accumulate=3, no_sync=False, config=FP8_WIRE),
    "every pass reduced, stage 1": Run(accumulate=3, no_sync=False, stage=1, max_norm=0.1),
    "every pass reduced, overlap": Run(accumulate=2, no_sync=False, config=OVERLAP),
    "one element": Run(specs=(Spec("one", (1,), dtype=FP32),), options=(ADAM,)),
    "zero betas": Run(options=({**ADAM, "betas": (0.0, 0.0)}, {**ADAM, "lr": 0.0})),
}


OVER_RANKS = (
    *("plain", "tiny buckets", "bf16 moments", "stage 1", "assigned gradients", "overlap", "experts"),
    *("8-bit moments", "8-bit moments, one element", "8-bit moments, faint gradients"),
    *("8-bit moments, codes in the same pass", "fp8 wire, deterministic", "fp8 wire, one element"),
    *("gathered scales, one bucket", "gathered scales, overlap", "gathered scales of experts"),
    *("no_sync", "no_sync, stage 1", "every pass reduced, fp8 wire", "every pass reduced, overlap"),
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


@pytest.mark.parametrize("config", [DETERMINISTIC, FP8_WIRE], ids=["as it lies", "fp8 wire"])
def test_every_backend_gives_the_bits(backend, config):
    config = dataclasses.replace(config, backend=backend)
    check(Run(MIXED, config=config, max_norm=0.1))


@pytest.mark.parametrize(("config", "adam"), [(DETERMINISTIC, "adam"), (EIGHT_BIT_MOMENTS, "adam_8bit")], ids=str)
def test_masters_are_updated_and_measured_in_one_pass(config, adam):
    """Each format and dtype has one op: Adam with amaxes and codes where scales are local, with amaxes for the rest."""
    trainer = Trainer(Run(MIXED, config=config))
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
    """torch.compile of `step` is allowed, as for torch's own optimizers: ours runs between graphs."""
    eager, compiled = Trainer(run), Trainer(run)
    step: Any = torch.compile(compiled.optimizer.step, backend="eager")
    for number in range(3):
        eager.backward(number)
        eager.optimizer.step()
        compiled.backward(number)
        step()
        casts.assert_same_bytes(snapshot(compiled), snapshot(eager), f"step {number}")


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
    """Scale buffers that were moved by hand are brought back before the next gather writes them."""
    trainer = Trainer(Run(specs=WHOLE, options=(ADAM,)))
    trainer.step(0)
    for name in ("even", "tall"):
        weight = trainer.probe.get_parameter(name)
        weight.state.move_to({"rowwise_scale_inv": torch.empty_like(weight.rowwise_scale_inv)})
    trainer.step(1)
    assert verify(trainer.optimizer).ok


# -- torch.optim.AdamW as the oracle, within a bound: its builds and variants differ among themselves by a few ulp

OF_TORCH = (
    Spec("a", (300, 70), dtype=FP32),
    Spec("b", (64, 128), "nvfp4", FP32),
    Spec("c", (999,), dtype=FP32, group=1),
)
ULP = 2.0**-23  # relative to the larger of a parameter and the learning rate
FIRST, EACH = 3, 2  # ulp that the first update may differ by, and on average each of 20
STEPS = 20


def distance(found: Tensor, wanted: Tensor, lr: float) -> float:
    """Return the largest difference in ulp. For elements below the learning rate it is in ulp of the learning rate."""
    return float(((found - wanted).abs() / (wanted.abs().clamp(min=lr) * ULP)).max())


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("fused", [False, True])
def test_the_reference_is_within_ulps_of_torch(fused, max_norm):
    """The reference's masters are near torch's after a first step, and after 20. Runs have its bits on any ranks."""
    reference, twins = Undistributed(OF_TORCH), {spec.name: nn.Parameter(spec.initial()) for spec in OF_TORCH}
    groups = [{"params": [twins[s.name] for s in OF_TORCH if s.group == i], **o} for i, o in enumerate(TWO_GROUPS)]
    oracle = torch.optim.AdamW(groups, fused=fused, foreach=False)
    distances = []
    for step in range(STEPS):
        gradients = {spec.name: mean([spec.gradient(step, rank) for rank in range(2)], spec) for spec in OF_TORCH}
        reference.step({name: [gradient] for name, gradient in gradients.items()}, TWO_GROUPS, max_norm)
        for name, gradient in gradients.items():
            twins[name].grad = torch.from_numpy(gradient)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(twins.values(), max_norm)
        oracle.step()
        masters = {name: torch.from_numpy(master) for name, master in reference.master.items()}
        rates = {spec.name: TWO_GROUPS[spec.group]["lr"] for spec in OF_TORCH}
        distances.append(max(distance(masters[name], twins[name].detach(), lr) for name, lr in rates.items()))
    assert distances[0] <= FIRST
    assert distances[-1] <= STEPS * EACH
