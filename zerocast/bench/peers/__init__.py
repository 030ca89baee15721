"""Peers: other implementations of the same work, timed in the same process on the same shapes.

torch's fused AdamW and copies are always there; TransformerEngine is timed where it can be
imported.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zerocast.bench.row import Build
from zerocast.bench.shard import STANDARD_DEVIATION
from zerocast.bench.work import HYPERPARAMETERS, Moments, in_a_graph
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


def copies(workload: Workload, fmt: str, place: Place) -> Job:
    """For every weight one copy of half the bytes that `upcast` moves: 3/4 byte an element read, as
    much written. The operands of a weight cannot be there sooner, in a launch of its own.
    """
    sources = [
        torch.ones(math.prod(shape) * 3 // 4, dtype=torch.uint8, device=place.device) for shape in workload.shapes
    ]
    copied = [torch.empty_like(source) for source in sources]

    def run() -> None:
        for source, target in zip(sources, copied, strict=True):
            target.copy_(source)

    return Job(in_a_graph(run, place.device), lambda: copied)


TORCH = Peer("torch fused", {"Adam": fused_adamw})
COPIES = Peer("torch copies", {"upcast": copies, "upcast transposed": copies})


def usable(device_type: str) -> list[Peer]:
    """The peers that can run on a device of this type."""
    from zerocast.bench.peers import transformer_engine  # noqa: PLC0415  (it imports Peer from here)

    found = [TORCH, COPIES]
    if device_type == "cuda" and transformer_engine.is_importable():
        found.append(transformer_engine.PEER)
    return found
