"""Collectives of a step: number, sizes and times. The first reduction starts before the last gradient exists."""

import itertools
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import zerocast
from tests.fsdp2.models import slow
from tests.fsdp2.test_host_work import calls_of_zerocast
from tests.observed import Dispatched, Traffic, same_on_all
from tests.optim.probe import FP32, PLAIN, Spec
from tests.optim.runs import ADAM, Run, Trainer
from tests.workers import on_ranks
from zerocast import ZeroAdamW, ZeroConfig
from zerocast.distributed.group import Flight, Group
from zerocast.optim.reduction import Reduction

MODEL = (
    Spec("embedding", (64, 32)),
    Spec("a", (32, 64), "nvfp4"),
    Spec("b", (64, 32), "nvfp4"),
    Spec("mx", (32, 64), "mxfp8"),
    Spec("delayed", (32, 64), "fp8_delayed:amax_history_len=4"),
    Spec("block", (40, 64), "fp8_block"),
    Spec("norm", (64,), dtype=FP32),
)


def one_step(run: Run, clip: bool) -> dict[str, int]:
    """Return the collectives of a third step. Torch must have seen no others."""
    trainer = Trainer(run)
    trainer.train(range(2))
    with Traffic() as traffic, CommDebugMode() as below:
        trainer.backward(2)
        if clip:
            trainer.optimizer.clip_grad_norm_(1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        for parameter in trainer.probe.parameters():
            _ = parameter.rowwise_data if hasattr(parameter, "rowwise_data") else parameter
    assert below.get_total_counts() == len(traffic.log), "something else communicates"
    return dict(Counter(kind for kind, _ in traffic.log))


@pytest.mark.parametrize(("overlap", "clip"), [(True, False), (False, True), slow(True, True), slow(False, False)])
@pytest.mark.parametrize(("bucket_size", "buckets"), [(1, 7), (4096, 6), (2**25, 5)])
@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2)
def test_collectives_of_a_step(stage, bucket_size, buckets, overlap, clip):
    """The bucket of mxfp8 gathers two directions. tests/cli/test_plan.py has the bytes."""
    config = ZeroConfig(bucket_size=bucket_size, overlap_all_gather=overlap)
    calls = one_step(Run(MODEL, options=(ADAM,), stage=stage, config=config), clip)
    assert calls == {"all-reduce": 2, "all-gather": buckets + 1, "reduce-scatter": buckets}


@on_ranks(2)
def test_deterministic_exchanges_in_their_place():
    """An all-to-all replaces each bucket's reduce-scatter, and an all-gather the all-reduce of the norm."""
    config = ZeroConfig(bucket_size=4096, deterministic=True)
    calls = one_step(Run(MODEL, options=(ADAM,), config=config), True)
    assert calls == {"all-reduce": 1, "all-gather": 6 + 1 + 1, "all-to-all": 6}


@pytest.mark.parametrize(("questions", "passes"), [(1, 1), (0, 3)])
@on_ranks(2)
def test_one_reduce_scatter_a_bucket_a_backward_pass(questions, passes):
    """Each bucket has one reduce-scatter. When no_sync first begins, ranks also compare how many passes they
    have reduced.
    """
    trainer = Trainer(Run(MODEL, options=(ADAM,), accumulate=3, no_sync=passes == 1, config=ZeroConfig()))
    with Traffic() as traffic:
        trainer.step(0)
    counts = Counter(kind for kind, _ in traffic.log)
    assert (counts["reduce-scatter"], counts["all-reduce"]) == (5 * passes, 2 + questions)


@on_ranks(2)
def test_accumulation_waits_for_no_answer():
    """The question is asked when no_sync first begins, and read when its answer has long arrived."""
    trainer = Trainer(Run(MODEL, options=(ADAM,), accumulate=3, config=ZeroConfig()))
    reduce, wait = Group.all_reduce_max, Flight.wait
    flights: list[Flight | None] = []
    events: list[str] = []

    def recorded_reduce(self: Group, tensor: Tensor, what: str = "", async_op: bool = False) -> Flight | None:
        flight = reduce(self, tensor, what, async_op)
        events.append("asks" if async_op else f"waits for {what}")
        flights.append(flight)
        return flight

    def recorded_wait(self: Flight) -> None:
        if self in flights:
            events.append("reads" if self.is_completed() else "waits for the answer")
        wait(self)

    with mock.patch.object(Group, "all_reduce_max", recorded_reduce), mock.patch.object(Flight, "wait", recorded_wait):
        trainer.backward(0)
        assert events == ["asks"]
        started = time.monotonic()
        while not all(flight is not None and flight.is_completed() for flight in flights):
            assert time.monotonic() < started + 10
        trainer.optimizer.clip_grad_norm_(1.0)
        trainer.optimizer.step()
    assert events == ["asks", "reads", "waits for the packed amaxes of a cast"]


@on_ranks(2)
def test_plain_parameters_are_gathered_first():
    """The step waits for them, and must not wait for the quantized weights between them as well."""
    shapes = {"embedding": 16, "w0": 32, "norm": 48, "w1": 64, "head": 80}
    specs = tuple(Spec(name, (rows, 16), "fp8_current" if name[0] == "w" else PLAIN) for name, rows in shapes.items())
    config = ZeroConfig(bucket_size=1, overlap_all_gather=True)
    trainer = Trainer(Run(specs, options=(ADAM,), config=config))
    with Traffic() as traffic:
        trainer.step(0)
    gathered = [nbytes // 16 for kind, nbytes in traffic.log if kind == "all-gather"]
    assert gathered == [2 * 16, 2 * 48, 2 * 80, 32, 64]


@on_ranks(2)
def test_reading_does_not_communicate():
    """A forward pass after the first one has no collectives."""
    trainer = Trainer(Run(MODEL, options=(ADAM,), config=ZeroConfig(overlap_all_gather=True)))
    trainer.step(0)
    gradients = {spec.name: spec.gradient(0, 0) for spec in MODEL}
    trainer.probe.loss(gradients)
    with Traffic() as traffic:
        trainer.probe.loss(gradients)
        trainer.optimizer.state_dict()
        _ = trainer.optimizer.skipped_steps
    assert not traffic.log


def operators(layers: int) -> tuple[Counter[str], int]:
    """Count the operators of clip and step, and the copies of a backward pass, of a model of `layers` weights
    in one bucket.
    """
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(layers))).bfloat16()
    optimizer = ZeroAdamW(model.named_parameters())
    loss = model(torch.randn(2, 32, dtype=torch.bfloat16)).sum()
    with Dispatched() as arrival:
        loss.backward()  # type: ignore[no-untyped-call]
    with Dispatched() as names:
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    return names.counts, arrival.counts["aten::copy_"]


@on_ranks(2)
def test_nothing_is_launched_for_each_gradient():
    """A bucket is packed and lands by operators over all of it; norm, clip and Adam are over flat shards."""
    assert operators(3) == operators(9)


# -- during the backward pass

LAYERS = 6


def model(fmt: str | None) -> nn.Sequential:
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    if fmt is not None:
        zerocast.quantize_(layers, zerocast.Recipe({"*.weight": fmt}))
    return layers


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("fmt", [None, "nvfp4", "mxfp8"])
@pytest.mark.parametrize("how", [{}, {"deterministic": True}, {"grad_wire": "fp8_1x128"}], ids=str)
@on_ranks(2)
def test_the_first_reduction_starts_before_the_last_gradient_exists(fmt, how, stage):
    """Collectives start as gradients become ready, in one order on every rank."""
    layers, kind = model(fmt), "all-to-all" if how else "reduce-scatter"
    optimizer = ZeroAdamW(layers.named_parameters(), stage=stage, config=ZeroConfig(bucket_size=64 * 64, **how))
    with Traffic() as traffic:
        for name, parameter in layers.named_parameters():
            parameter.register_hook(lambda _, name=name: traffic.log.append((name, 0)))
        layers(torch.randn(2, 64)).sum().backward()  # type: ignore[no-untyped-call]
    del optimizer
    events = same_on_all([event for event, _ in traffic.log])
    names = [name for name in events if name != kind]
    assert len(names) == 2 * LAYERS
    for layer in range(LAYERS - 1):
        last_of_bucket, next_layer = f"{LAYERS - 1 - layer}.weight", f"{LAYERS - 2 - layer}.weight"
        assert events.index(last_of_bucket) < events.index(next_layer)
    before_the_last_gradient = events[: max(events.index(name) for name in names)]
    assert before_the_last_gradient.count(kind) >= LAYERS - 2
    assert events.index(kind) < events.index(f"{LAYERS - 3}.weight"), "the first starts once its bucket is full"


@on_ranks(2)
def test_reductions_of_two_passes_in_flight_land_in_order():
    """A reduction outlives its pass beside another optimizer. FP32 is otherwise reduced into the shard itself."""
    reduce, number = Group.reduce_scatter_mean, itertools.count()

    def call(group: Group, out: torch.Tensor, full: torch.Tensor, async_op: bool = False, what: str = "") -> Any:
        if next(number):
            return reduce(group, out, full)
        return SimpleNamespace(wait=lambda: reduce(group, out, full))  # the first one runs when it is waited for

    first, second = (nn.Linear(16, 16, bias=False) for _ in range(2))
    optimizer, beside = (ZeroAdamW(model.named_parameters()) for model in (first, second))
    with (
        mock.patch.object(Reduction, "is_complete", return_value=False),
        mock.patch.object(Group, "reduce_scatter_mean", call),
    ):
        for factor in (1.0, 2.0):
            optimizer.zero_grad()
            (first(torch.ones(1, 16)).sum() * factor).backward()  # type: ignore[no-untyped-call]
        assert first.weight.grad is not None
        whole: torch.Tensor = first.weight.grad.full_tensor()  # type: ignore[attr-defined]
    del beside
    assert torch.equal(whole, torch.full((16, 16), 2.0))


# -- on the host

# Calls of functions of zerocast in a step of one bucket of weights and one of biases, and the files that they are in. With
# every gain these bounds come down.
MAX_CALLS = {"fp8_current": 150, "fp8_block": 146, "nvfp4": 150, "fp8_delayed": 164}
MAX_FILES = 31


def step_of(fmt: str) -> partial[object]:
    """Return a step with gradients, after earlier ones."""
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


@pytest.mark.parametrize("fmt", MAX_CALLS)
def test_a_step_makes_few_calls(fmt: str) -> None:
    step = step_of(fmt)
    # Other tests of the process may have registered hooks on all optimizers, which count too.
    with (
        mock.patch.dict(_global_optimizer_pre_hooks, clear=True),
        mock.patch.dict(_global_optimizer_post_hooks, clear=True),
    ):
        by_file = calls_of_zerocast(step)
    assert by_file.total() <= MAX_CALLS[fmt] and len(by_file) <= MAX_FILES, by_file
