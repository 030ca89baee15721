"""Memory: gradients freed as they are reduced, no new buffers after the first step, and a total that arithmetic predicts."""

import gc
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zerocast
from tests.optim.memory import NewStorages, allocations, live_bytes, settled_bytes
from tests.optim.probe import BF16, FP32, PLAIN, Spec
from tests.optim.runs import ADAM, Run, Trainer
from tests.selection import worlds
from tests.workers import on_ranks
from zerocast import ZeroAdamW, ZeroConfig, get_format
from zerocast.formats import Columnwise, layout
from zerocast.optim import gradients, reduction

LAYERS, WIDTH = 10, 128
LAYER = WIDTH * WIDTH
SMALL = 64 * 1024  # activations, scalars, sums of chunks


def layers(fmt: str | None) -> nn.Sequential:
    """Equal linear layers in FP32."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return model if fmt is None else zerocast.quantize_(model, zerocast.Recipe({"*": fmt}))  # type: ignore[return-value]


def peak_of_a_backward_pass(
    fmt: str | None, stage: int, deterministic: bool, bucket_layers: int, in_flight: int = 1
) -> int:
    """The most that gradients and buckets take at any gradient's arrival, apart from the FP32 shard, where `in_flight` buckets
    may be on their way and none arrives before it is waited for.
    """
    model = layers(fmt)
    config = ZeroConfig(bucket_size=bucket_layers * LAYER, deterministic=deterministic)
    optimizer = ZeroAdamW(model.named_parameters(), stage=stage, config=config)
    levels: list[int] = []
    known = frozenset([optimizer._reducer.gradients.flat.untyped_storage().data_ptr()])
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: levels.append(settled_bytes(known)))
    loss = model(torch.randn(2, WIDTH)).square().sum()
    gc.collect()
    gc.freeze()  # what there was before need not be searched again
    before = live_bytes(known)
    with (
        mock.patch.object(gradients, "IN_FLIGHT", in_flight),
        mock.patch.object(reduction.Reduction, "is_complete", return_value=False),
    ):
        loss.backward()  # type: ignore[no-untyped-call]
    del optimizer
    gc.unfreeze()
    assert len(levels) == LAYERS
    return max(levels) - before


@pytest.mark.parametrize(("fmt", "bucket_layers"), [("nvfp4", 1), (None, 2)])
@on_ranks(2)
def test_stage_2_holds_buckets_in_flight_and_what_has_arrived_of_the_next(fmt, bucket_layers):
    """Not the 10 gradients of the model. FP32 is reduced into the shard, without a place for the result."""
    bucket, arrived = 4 * LAYER * bucket_layers, 4 * LAYER * (bucket_layers - 1)
    for in_flight in (1, 3):
        peak = peak_of_a_backward_pass(fmt, 2, False, bucket_layers, in_flight)
        assert abs(peak - in_flight * bucket - arrived) <= SMALL / 4


@on_ranks(2)
def test_a_discarded_optimizer_takes_no_buckets():
    """The reducer of one without references, before the garbage collector has seen it: beside a living one, neither waits for
    its reductions, and more buckets are on their way.
    """
    gc.disable()
    try:
        cycle: list[Any] = [ZeroAdamW(layers(None).named_parameters())]
        cycle.append(cycle)
        del cycle
        assert peak_of_a_backward_pass(None, 2, False, 1) <= 4 * LAYER + SMALL / 4
    finally:
        gc.enable()


@on_ranks(2)
def test_stage_1_holds_gradients_too():
    assert peak_of_a_backward_pass(None, 1, False, 1) >= 4 * LAYER * LAYERS


@on_ranks(2)
def test_deterministic_takes_a_bucket_more():
    """Every rank's part is kept until all are here."""
    assert peak_of_a_backward_pass(None, 2, True, 1) <= 2 * 4 * LAYER + SMALL


@pytest.mark.parametrize(
    ("deterministic", "overlap"), [(False, True), pytest.param(True, False, marks=pytest.mark.slow)]
)
@on_ranks(1, 2)
def test_a_later_step_allocates_nothing_large(world, deterministic, overlap):
    shard = 4 * (4 * 1024 * 512 + 512 * 512) // world
    config = ZeroConfig(2**18, overlap, deterministic)
    specs = tuple(Spec(f"w{i}", (1024, 512), fmt) for i, fmt in enumerate(("nvfp4", "fp8_block", "mxfp8", PLAIN)))
    trainer = Trainer(Run((*specs, Spec("d", (512, 512), "fp8_delayed")), options=(ADAM,), config=config))
    found = []
    for step in range(4):
        gradients = {spec.name: spec.gradient(step, trainer.rank) for spec in trainer.run.specs}
        trainer.probe.loss(gradients).backward()  # type: ignore[no-untyped-call]

        def update() -> None:
            trainer.optimizer.clip_grad_norm_(1.0)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            for parameter in trainer.probe.parameters():
                _ = getattr(parameter, "rowwise_data", None)

        before = live_bytes()
        if world == 1:
            largest = max(allocations(update).sizes)
        else:
            with NewStorages() as new:
                update()
            largest = max(new.sizes)
        found.append((largest, live_bytes() - before))
    for largest, left in found[2:]:
        assert largest <= shard / 8
        assert left <= 1024


@pytest.mark.parametrize("grad_dtype", [None, BF16, FP32])
@on_ranks(2)
def test_backward_passes_leave_nothing(grad_dtype):
    trainer = Trainer(Run(steps=1, config=ZeroConfig(grad_dtype=grad_dtype, bucket_size=4096)))
    levels = []
    for step in (2, 4, 6, 8):  # the same parameters take part
        trainer.step(step)
        levels.append(live_bytes())
    rank = [after - before for before, after in zip(levels, levels[1:], strict=False)]
    assert max(rank) <= 1024


MODEL = (
    Spec("embedding", (512, 256)),
    Spec("a", (256, 1024), "nvfp4"),
    Spec("b", (1024, 256), "nvfp4"),
    Spec("mx", (256, 512), "mxfp8"),
    Spec("delayed", (512, 256), "fp8_delayed"),
    Spec("block", (512, 256), "fp8_block"),
    Spec("norm", (256,), dtype=FP32),
)


def predicted(specs: tuple[Spec, ...], world: int, config: ZeroConfig) -> dict[str, float]:
    """Every term, in bytes a rank."""
    numel = sum(math.prod(spec.shape) for spec in specs)
    terms: dict[str, float] = {
        "masters": 4 * numel / world,
        "moments": 2 * config.moment_dtype.itemsize * numel / world,
        "gradients": 4 * numel / world,
    }
    terms["weights"] = terms["scales"] = terms["columnwise copies"] = terms["packed amaxes"] = 0
    for spec in specs:
        fmt = get_format("identity" if spec.fmt == PLAIN else spec.fmt)
        for name, buffer in layout.buffers(fmt, layout.matrix_shape(spec.shape), spec.dtype).items():
            copy = name.startswith("columnwise") and fmt.columnwise is Columnwise.TRANSPOSE
            shared = name == "columnwise_scale_inv" and fmt.block is None
            if buffer is not None and not shared and (config.keep_columnwise or not copy):
                term = "columnwise copies" if copy else "weights" if name.endswith("data") else "scales"
                terms[term] += math.prod(buffer.shape) * buffer.dtype.itemsize
        terms["packed amaxes"] += 2 * sum(layout.amax_counts(fmt, *layout.matrix_shape(spec.shape)))
    return terms


@pytest.mark.parametrize(
    ("moment_dtype", "keep_columnwise"),
    [(BF16, False), (FP32, True), pytest.param(FP32, False, marks=pytest.mark.slow)],
    ids=str,
)
@on_ranks(*worlds(2, slow=(1, 4)))
def test_the_total_is_what_arithmetic_says(world, moment_dtype, keep_columnwise):
    """Bytes that a model and its optimizer live on between steps."""
    config = ZeroConfig(bucket_size=2**18, moment_dtype=moment_dtype, keep_columnwise=keep_columnwise)
    terms = predicted(MODEL, world, config)
    gc.collect()  # the garbage of earlier cases must not leave in between
    before = live_bytes()
    trainer = Trainer(Run(MODEL, options=(ADAM,), config=config))
    trainer.train(range(3))
    trainer.probe.zero_grad()
    gc.collect()
    assert live_bytes() - before == pytest.approx(sum(terms.values()), rel=0.02), terms


def test_initial_values_are_dropped_once_there_are_masters():
    trainer = Trainer(Run(MODEL, options=(ADAM,)))
    assert all(getattr(p, "high_precision_init_val", None) is None for p in trainer.probe.parameters())
