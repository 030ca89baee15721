"""Peers: what else does the same work on the same tensors, timed in the same process where it is installed."""

from collections.abc import Mapping
from dataclasses import dataclass

from zerocast.bench.row import Build


@dataclass(frozen=True)
class Peer:
    """An implementation by others: how it sets up the works that it has, by the name of the work."""

    name: str
    works: Mapping[str, Build]


def usable(device_type: str) -> list[Peer]:
    """The peers that can run here. Imported only now: they are optional."""
    from zerocast.bench.peers import torch_adamw, transformer_engine  # noqa: PLC0415

    found = [torch_adamw.PEER]
    if device_type == "cuda" and transformer_engine.is_importable():
        found.append(transformer_engine.PEER)
    return found
