"""Adam steps as jobs: alone, and whole, with the amaxes in the same pass and the cast after it."""

from typing import Any

import torch
from torch import Tensor

from zerocast.backends import ops
from zerocast.bench.job import Job, Place
from zerocast.bench.shard import STANDARD_DEVIATION, Shard
from zerocast.bench.workload import Workload
from zerocast.cast.adam_update import AdamUpdate
from zerocast.cast.hyperparameters import Hyperparameters

HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEP = 10
GRADIENT = 1e-3


class Moments:
    """A gradient, both moments and the scalars of step `STEP`, for `numel` masters."""

    def __init__(self, numel: int, device: torch.device, random: torch.Generator) -> None:
        def normal() -> Tensor:
            return torch.empty(numel, device=device).normal_(0, GRADIENT, generator=random)

        self.grad, self.exp_avg, self.exp_avg_sq = normal(), normal(), normal().square_()
        hyperparameters = Hyperparameters(1, device)
        hyperparameters.refresh([HYPERPARAMETERS])
        self.scalars = hyperparameters.scalars(torch.full((1,), STEP, device=device))
        self.clip = torch.ones(1, device=device)


def adam(workload: Workload, fmt: str, place: Place) -> Job:
    """`adam_step` on the flat shard."""
    random, numel = place.generator(), workload.owned
    master = torch.empty(numel, device=place.device).normal_(0, STANDARD_DEVIATION, generator=random)
    m = Moments(numel, place.device, random)
    segments = torch.tensor([[0, numel, 0]], device=place.device)
    state = {"master": master, "grad": m.grad, "exp_avg": m.exp_avg, "exp_avg_sq": m.exp_avg_sq}
    return Job(
        lambda: ops.adam_step(place.backend, **state, segments=segments, scalars=m.scalars, clip=m.clip, skip=None),
        lambda: (master, m.exp_avg, m.exp_avg_sq),
    )


def step(workload: Workload, fmt: str, place: Place) -> Job:
    """Everything after the reduce-scatter: Adam with amaxes in one pass, scales, cast."""
    shard = Shard(workload, fmt, place)
    table, packed = shard.table(), shard.plan.packed
    m = Moments(shard.flat.numel(), place.device, place.generator())
    update = AdamUpdate(m.grad, m.exp_avg, m.exp_avg_sq, m.scalars, m.clip)

    def run() -> None:
        packed.begin()
        table.adam_amax(update, packed.buffer, None)
        table.compute_scales(packed.buffer, None)
        table.partial_cast(packed.buffer, None)

    return Job(run, lambda: [shard.flat, m.exp_avg, m.exp_avg_sq, *shard.written()])
