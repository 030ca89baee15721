"""Memory: no new buffers after the first step, and nothing that a dropped optimizer or a backward pass leaves behind, on its model
or in the process.

That a run holds what `zerocast plan` says, gradients and buckets in flight too, is asked in `tests/cli/test_plan.py`.
"""

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zerocast
from tests import observed
from tests.observed import NewStorages, allocations, live_bytes
from tests.optim.probe import BF16, FP32, PLAIN, Spec
from tests.optim.runs import ADAM, OVERLAP, Run, Trainer, weight_bytes
from tests.workers import on_ranks
from zerocast import Recipe, ZeroAdamW, ZeroConfig
from zerocast.distributed.bucket import IN_FLIGHT
from zerocast.optim import reduction


@pytest.mark.parametrize(
    ("deterministic", "overlap"), [(False, True), pytest.param(True, False, marks=pytest.mark.slow)]
)
@on_ranks(1, 2)
def test_a_later_step_allocates_nothing_large(world, deterministic, overlap):
    shard = 4 * (4 * 512 * 512 + 512 * 256) // world
    config = ZeroConfig(2**17, overlap, deterministic)
    specs = tuple(Spec(f"w{i}", (512, 512), fmt) for i, fmt in enumerate(("nvfp4", "fp8_block", "mxfp8", PLAIN)))
    trainer = Trainer(Run((*specs, Spec("d", (512, 256), "fp8_delayed")), options=(ADAM,), config=config))
    found = []
    for step in range(4):
        trainer.probe.backward(step, trainer.rank)

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


@pytest.mark.parametrize(("bucket_size", "in_flight"), [(32, 4), (32 * 32 * 5 // IN_FLIGHT, 5)])
@on_ranks(2)
def test_so_many_buckets_are_in_flight(bucket_size: int, in_flight: int) -> None:
    """As many as have `IN_FLIGHT * bucket_size` elements, or four weights, whichever is more, if none arrives before
    it is waited for. Nothing is in flight beside the larger head.
    """
    head = nn.Linear(32, 4096, bias=False)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)), head)
    optimizer = ZeroAdamW(model.named_parameters(), config=ZeroConfig(bucket_size=bucket_size))
    flying, counts = optimizer._reducer._in_flight, list[int]()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: counts.append(len(flying)))
    with mock.patch.object(reduction.Reduction, "is_complete", return_value=False):
        model(torch.randn(2, 32)).sum().backward()
    assert (counts[:2], len(counts), max(counts)) == ([1, 1], 7, in_flight)


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


def test_initial_values_are_dropped_once_there_are_masters():
    assert all(getattr(p, "high_precision_init_val", None) is None for p in Trainer(Run()).probe.parameters())


@on_ranks(2)
def test_a_discarded_optimizer_holds_no_buckets_back():
    """An unreferenced optimizer that awaits garbage collection does not count. Beside a living one, reductions
    are not waited for, and more buckets are in flight.
    """
    gc.disable()
    try:
        cycle: list[Any] = [ZeroAdamW(torch.nn.Linear(8, 8).named_parameters())]
        cycle.append(cycle)
        del cycle
        assert not ZeroAdamW(torch.nn.Linear(8, 8).named_parameters())._reducer._coexisting
    finally:
        gc.enable()


def test_an_optimizer_is_freed_with_its_last_reference():
    """No cycle keeps masters alive; its hooks then do nothing, and gradients stay on the parameters."""
    torch.optim.SGD(
        [torch.zeros(1)]
    )  # the first of a process imports torch's compiler, which leaves frames to the collector
    gc.disable()
    try:
        trainer = Trainer(Run(config=OVERLAP))
        trainer.step(0)
        optimizer, probe = weakref.ref(trainer.optimizer), trainer.probe
        del trainer
        assert optimizer() is None
    finally:
        gc.enable()
    probe.backward(1, 0)
    assert probe.get_parameter("nv").grad is not None
    assert weight_bytes(probe)


# -- what grows with optimizers that are built, used and dropped

WARM = 4
FORMATS = Recipe({"0.weight": "nvfp4", "1.weight": "fp8_delayed", "2.weight": "mxfp8"})
MAX_BYTES = 2**17  # an optimizer, where a leaked one would be 2**19 and more


def model() -> nn.Sequential:
    """Return a model of three formats and biases, with masters and moments of 200 KB."""
    made = nn.Sequential(*(nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(4)))
    zerocast.quantize_(made, FORMATS)
    return made


def train(made: nn.Module, *optimizers: ZeroAdamW) -> None:
    for optimizer in optimizers:
        made(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


class Optimizers:
    """Optimizers that are built and used, one after the other."""

    def __init__(self, life: str) -> None:
        self.life, self.model = life, model()
        # An optimizer that stays gives each of the others a process group of its own.
        self.kept = [ZeroAdamW(self.model[:2].named_parameters())] if life == "beside one that stays" else []

    def build(self) -> None:
        if self.life == "new models":
            self.model = model()
        optimizer: Any = ZeroAdamW(self.model[2 * len(self.kept) :].named_parameters())
        if self.life == "in cycles":  # which only a garbage collection lets go of
            optimizer.itself = optimizer
        train(self.model, optimizer, *self.kept)


SHORT = (("one model", 1, 3), ("beside one that stays", 2, 3))
LIVES = ("one model", "new models", "beside one that stays", "in cycles")
LONG = [pytest.param(life, world, 200, marks=pytest.mark.slow) for life in LIVES for world in (1, 2)]


@pytest.mark.parametrize(("life", "world", "count"), [*SHORT, *LONG])
@on_ranks(timeout=600.0)
def test_optimizers_that_are_dropped(life: str, count: int) -> None:
    """Dropped optimizers leave no objects and few bytes behind, and at most one hook on each parameter."""
    optimizers = Optimizers(life)
    for _ in range(WARM):
        optimizers.build()
    before, memory = observed.process_counts(), observed.resident_bytes()
    for _ in range(count):
        optimizers.build()
    after = observed.process_counts()
    for _ in range(3):  # what another thread was just letting go of is gone then, what is left behind is not
        optimizers.build()
        after &= observed.process_counts()
    used = (observed.resident_bytes() - memory) / (count + 3)
    assert observed.grown(before, after) == {}
    assert used < MAX_BYTES or count < 200
    assert all(len(parameter._post_accumulate_grad_hooks or ()) <= 1 for parameter in optimizers.model.parameters())
