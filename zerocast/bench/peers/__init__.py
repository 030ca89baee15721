"""Peers: other implementations of the same work, timed in the same process on the same shapes.

torch's fused AdamW and copies are always timed, TransformerEngine if it can be imported.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zerocast.bench.row import Build
from zerocast.bench.shard import STANDARD_DEVIATION
from zerocast.bench.work import HYPERPARAMETERS, Moments, in_a_graph
from zerocast.bench.workload import BenchEnv, Job, Workload


@dataclass(frozen=True)
class Peer:
    """Another implementation.

    Attributes:
        name: the name in the report.
        works: dict from the name of a kind of work that the peer can do to the function that sets
            it up.
    """

    name: str
    works: Mapping[str, Build]


def fused_adamw(workload: Workload, fmt: str, env: BenchEnv) -> Job:
    """Return the job of one step of torch.optim.AdamW with fused=True on the flat shard. Its bits
    differ from zerocast's.
    """
    random = env.generator()
    numel = workload.owned
    master = torch.empty(numel, device=env.device).normal_(0, STANDARD_DEVIATION, generator=random)
    parameter = torch.nn.Parameter(master)
    parameter.grad = Moments(numel, env.device, random).grad
    optimizer = torch.optim.AdamW([parameter], fused=True, **HYPERPARAMETERS)
    return Job(optimizer.step, lambda: [parameter.detach()])


def copies(workload: Workload, fmt: str, env: BenchEnv) -> Job:
    """Return the job of one copy for every layer: 3/4 byte per element read and written, which is
    as much traffic as `upcast` has. No kernel that is launched once per layer can be faster.
    """
    layer_bytes = sum(map(math.prod, workload.layer)) * 3 // 4
    sources = [torch.ones(layer_bytes, dtype=torch.uint8, device=env.device) for _ in range(workload.layers)]
    targets = [torch.empty_like(source) for source in sources]

    def run() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    return Job(in_a_graph(run, env.device), lambda: targets)


TORCH = Peer("torch fused", {"Adam": fused_adamw})
COPIES = Peer("torch copies", {"upcast": copies, "upcast transposed": copies})


def usable(device_type: str) -> list[Peer]:
    """Return the peers that can run on a device of this type."""
    # That module imports Peer from here.
    from zerocast.bench.peers import transformer_engine  # noqa: PLC0415

    peers = [TORCH, COPIES]
    if device_type == "cuda" and transformer_engine.is_importable():
        peers.append(transformer_engine.PEER)
    return peers
