"""torch.optim.AdamW with fused=True on one flat parameter: the step that people have today."""

import torch

from zerocast.bench.adam_work import HYPERPARAMETERS, Moments
from zerocast.bench.job import Job, Place
from zerocast.bench.peers import Peer
from zerocast.bench.shard import STANDARD_DEVIATION
from zerocast.bench.workload import Workload


def adam(workload: Workload, fmt: str, place: Place) -> Job:
    """One fused kernel family over the flat shard; its bits are not ours (design: adam_step)."""
    random, numel = place.generator(), workload.owned
    master = torch.empty(numel, device=place.device).normal_(0, STANDARD_DEVIATION, generator=random)
    parameter = torch.nn.Parameter(master)
    parameter.grad = Moments(numel, place.device, random).grad
    optimizer = torch.optim.AdamW([parameter], fused=True, **HYPERPARAMETERS)
    return Job(optimizer.step, lambda: [parameter.detach()])


PEER = Peer("torch fused", {"Adam": adam})
