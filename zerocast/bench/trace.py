"""A Chrome trace of two optimizer steps, with the all-gather overlapping the next forward pass.

With several ranks, one GPU each, the collectives are NCCL kernels on their own stream. A single
rank has no collective to show.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from zerocast.formats.recipe import Recipe
from zerocast.optim import ZeroAdamW, ZeroConfig
from zerocast.quantize import quantize_
from zerocast.weight import QuantizedWeight

FORMAT = "nvfp4"
WIDTH, LAYERS, TOKENS = 4096, 12, 8192
WARM_UP, TRACED = 3, 2
Interval = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Microseconds of all-gathers on this rank's device, and how many of them other kernels
    overlap.
    """

    gathered: float
    hidden: float


def write_trace(path: Path, device: torch.device, scale: int = 1, backend: str | None = None) -> Overlap | None:
    """Train a stack of linear layers over the default process group and write rank 0's trace.

    The trace goes to `path`. `scale` divides the width. Returns the overlap on rank 0 of GPUs, None
    on other ranks and on CPUs.
    """
    trainer = _Trainer(device, max(32, WIDTH // scale), backend)
    for _ in range(WARM_UP):
        trainer.step()
    _synchronize(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    # on every rank: profiling slows all of them alike
    with profile(activities=activities) as profiler:
        for _ in range(TRACED):
            trainer.step()
        trainer.land()
        _synchronize(device)
    if dist.is_initialized() and dist.get_rank():
        return None
    profiler.export_chrome_trace(str(path))
    return _overlap(profiler) if device.type == "cuda" else None


class _Trainer:
    """A model with one bucket for each layer, so that a layer's gather can overlap the layers
    before.
    """

    def __init__(self, device: torch.device, width: int, backend: str | None) -> None:
        torch.manual_seed(0)
        with device:
            layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width, bias=False), nn.GELU())]
            self._model = nn.Sequential(*layers)
        quantize_(self._model, Recipe({"*.weight": FORMAT}), dtype=torch.bfloat16)
        config = ZeroConfig(bucket_size=width * width, overlap_all_gather=True, backend=backend)
        self._optimizer = ZeroAdamW(self._model.named_parameters(), lr=1e-4, config=config)
        self._inputs = torch.randn(TOKENS * width // WIDTH, width, device=device, dtype=torch.bfloat16)

    def step(self) -> None:
        """Run forward, backward and optimizer, each under its name in the trace."""
        with record_function("forward"):
            loss = self._model(self._inputs).float().square().mean()
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            self._optimizer.step()
            self._optimizer.zero_grad()

    def land(self) -> None:
        """Wait for the last gathers.

        With gloo and torch 2.13, a gather that outlives its profiler crashes the process.
        """
        for weight in self._model.parameters():
            if isinstance(weight, QuantizedWeight):
                weight.wait()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _overlap(profiler: profile) -> Overlap:
    gathers, others = [], []
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            interval = event.time_range.start, event.time_range.end
            name = event.name.lower()
            if "nccl" not in name:
                others.append(interval)
            elif "allgather" in name:
                gathers.append(interval)
    return overlap(gathers, others)


def overlap(gathers: Iterable[Interval], others: Iterable[Interval]) -> Overlap:
    """The length of the union of `gathers`, and of the part of it that `others` cover."""
    gathered, busy = _union(gathers), _union(others)
    hidden = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in gathered for b in busy)
    return Overlap(sum(stop - start for start, stop in gathered), hidden)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged
