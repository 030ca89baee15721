"""Peers: other implementations of the same work, timed in the same process on the same shapes.

torch's fused AdamW is always there; TransformerEngine is timed where it can be imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zerocast.bench.row import Build
from zerocast.bench.shard import STANDARD_DEVIATION
from zerocast.bench.work import HYPERPARAMETERS, Moments
from zerocast.bench.workload import Job, Place, Workload


@dataclass(frozen=True)
class Peer:
    """Another implementation: its name in the report, and how to set up each work that it can
    do, by the work's name.
    """

    name: str
    works: Mapping[str, Build]


def fused_adamw(workload: Workload, fmt: str, place: Place) -> Job:
    """One step of torch.optim.AdamW with fused=True on the flat shard; its bits differ from
    those of `adam_step`.
    """
    random, numel = place.generator(), workload.owned
    master = torch.empty(numel, device=place.device).normal_(0, STANDARD_DEVIATION, generator=random)
    parameter = torch.nn.Parameter(master)
    parameter.grad = Moments(numel, place.device, random).grad
    optimizer = torch.optim.AdamW([parameter], fused=True, **HYPERPARAMETERS)
    return Job(optimizer.step, lambda: [parameter.detach()])


TORCH = Peer("torch fused", {"Adam": fused_adamw})


def usable(device_type: str) -> list[Peer]:
    """The peers that can run on a device of this type."""
    from zerocast.bench.peers import transformer_engine  # noqa: PLC0415  (it imports Peer from here)

    found = [TORCH]
    if device_type == "cuda" and transformer_engine.is_importable():
        found.append(transformer_engine.PEER)
    return found
