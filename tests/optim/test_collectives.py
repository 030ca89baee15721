"""How often a step communicates, and how much: counted twice, at torch.distributed and below it."""

import time
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from tests.dispatched import Dispatched
from tests.optim.probe import FP32, PLAIN, Spec
from tests.optim.runs import ADAM, Run, Trainer
from tests.optim.traffic import recorded
from tests.workers import on_ranks
from zerocast import ZeroAdamW, ZeroConfig
from zerocast.distributed.group import Flight, Group

MODEL = (
    Spec("embedding", (64, 32)),
    Spec("a", (32, 64), "nvfp4"),
    Spec("b", (64, 32), "nvfp4"),
    Spec("mx", (32, 64), "mxfp8"),
    Spec("delayed", (32, 64), "fp8_delayed:amax_history_len=4"),
    Spec("block", (40, 64), "fp8_block"),
    Spec("norm", (64,), dtype=FP32),
)


def one_step(run: Run, clip: bool) -> tuple[dict[str, int], int]:
    """The collectives of a third step, and how many torch has seen below them."""
    trainer = Trainer(run)
    trainer.train(range(2))
    with recorded() as log, CommDebugMode() as below:
        trainer.backward(2)
        if clip:
            trainer.optimizer.clip_grad_norm_(1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        for parameter in trainer.probe.parameters():
            _ = parameter.rowwise_data if hasattr(parameter, "rowwise_data") else parameter
    return dict(Counter(kind for kind, _ in log)), below.get_total_counts()


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("bucket_size", "buckets"), [(1, 7), (4096, 6), (2**25, 5)])
@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2)
def test_collectives_of_a_step(stage, bucket_size, buckets, overlap, clip):
    """The bucket of mxfp8 gathers two directions. How many bytes: tests/cli/test_plan.py."""
    config = ZeroConfig(bucket_size=bucket_size, overlap_all_gather=overlap)
    calls, below = one_step(Run(MODEL, options=(ADAM,), stage=stage, config=config), clip)
    assert calls == {"all-reduce": 2, "all-gather": buckets + 1, "reduce-scatter": buckets}
    assert below == sum(calls.values()), "something else communicates"


@on_ranks(2)
def test_deterministic_exchanges_in_their_place():
    """An all-to-all a bucket for the reduce-scatter, an all-gather for the all-reduce of the norm."""
    config = ZeroConfig(bucket_size=4096, deterministic=True)
    calls, _ = one_step(Run(MODEL, options=(ADAM,), config=config), True)
    assert calls == {"all-reduce": 1, "all-gather": 6 + 1 + 1, "all-to-all": 6}


@pytest.mark.parametrize(("questions", "passes"), [(1, 1), (0, 3)])
@on_ranks(2)
def test_one_reduce_scatter_a_bucket_a_backward_pass(questions, passes):
    """Where no_sync first begins, ranks also ask each other how many passes they have reduced."""
    trainer = Trainer(Run(MODEL, options=(ADAM,), accumulate=3, no_sync=passes == 1, config=ZeroConfig()))
    with recorded() as log:
        trainer.step(0)
    counts = Counter(kind for kind, _ in log)
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
    with recorded() as log:
        trainer.step(0)
    gathered = [nbytes // 16 for kind, nbytes in log if kind == "all-gather"]
    assert gathered == [2 * 16, 2 * 48, 2 * 80, 32, 64]


@on_ranks(2)
def test_reading_does_not_communicate():
    """Collectives of a forward pass after the first one."""
    trainer = Trainer(Run(MODEL, options=(ADAM,), config=ZeroConfig(overlap_all_gather=True)))
    trainer.step(0)
    gradients = {spec.name: spec.gradient(0, 0) for spec in MODEL}
    trainer.probe.loss(gradients)
    with recorded() as log:
        trainer.probe.loss(gradients)
        trainer.optimizer.state_dict()
        _ = trainer.optimizer.skipped_steps
    assert len(log) == 0


def operators(layers: int) -> tuple[Counter[str], int]:
    """Those of clip and step, and the copies of a backward pass, of a model with so many weights in one bucket."""
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
