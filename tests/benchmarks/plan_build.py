"""Time and memory of building a CastPlan on one of many ranks, and of its casts, as ranks and weights grow.

This process is one rank. The others are simulated: they pass the same weights, and own the elements that this rank does not. So the
work of one rank is measured, and what its collectives carry; their time on a network is not.
Each line is a process of its own, whose peak memory is measured beyond the weights and masters. Weights are 32x32, in flat buffers.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from torch import Tensor

import zerocast
from zerocast.bench.work import SimulatedGroup
from zerocast.bench.workload import Workload
from zerocast.formats.layout import BUFFERS, Span
from zerocast.weight.buffers import into_flat_buffer

RANKS = (8, 64, 512, 2048, 4096, 16384)
WEIGHTS = (8, 100, 1_000, 10_000, 44_544, 100_000)
SHAPE = (32, 32)
REPEATS = 20


class CutEach(Workload):
    """Cuts of each weight into equal shards by itself, as when every rank has a part of everything."""

    def spans(self, rank: int) -> Iterator[Span]:
        """Yield the span of each weight that `rank` owns, empty where there are more ranks than elements."""
        for rows, columns in self.shapes:
            numel = rows * columns
            yield Span(numel * rank // self.world, numel * (rank + 1) // self.world)


WORKLOADS = {"end to end": Workload, "each": CutEach}


@dataclass(frozen=True)
class Counted(SimulatedGroup):
    """A simulated group that records the bytes of each collective."""

    log: list[int] = field(default_factory=list)

    def all_reduce_max(self, tensor: Tensor, what: str = "") -> None:
        self.log.append(tensor.nbytes)

    def all_reduce_sum(self, tensor: Tensor, what: str = "") -> None:
        """Note it, and answer as the simulated group does."""
        self.log.append(tensor.nbytes)
        super().all_reduce_sum(tensor, what)


def measure(ranks: int, weights: int, cut: str, fmt: str) -> dict[str, float | int | str]:
    """Build a plan on the middle rank and cast."""
    torch.set_num_threads(1)  # torch's own threads would wait for each other at such small tensors
    workload = WORKLOADS[cut]("plan", (SHAPE,), weights, ranks // 2, ranks)
    model = [zerocast.QuantizedWeight.empty(SHAPE, fmt) for _ in workload.shapes]
    for name in BUFFERS:
        into_flat_buffer([weight for weight in model if weight.state.buffers[name] is not None], name)
    spans = list(workload.spans(workload.rank))
    masters = torch.randn(sum(span.numel for span in spans)).split([span.numel for span in spans])
    group = Counted(None, workload.rank, workload.world, workload)
    before, start = peak(), time.perf_counter()
    plan = zerocast.CastPlan(model, list(masters), [span.start for span in spans], group)
    built, collectives = time.perf_counter() - start, list(group.log)
    nothing = mock.patch("zerocast.backends.ops._implementation", return_value=lambda *arguments: None)
    with nothing:
        host = median(seconds(plan) for _ in range(REPEATS))
    return {
        "ranks": ranks,
        "weights": weights,
        "cut": cut,
        "seconds": built,
        "peak_mb": (peak() - before) / 1024,
        "collectives": len(collectives),
        "bytes": sum(collectives),
        "cast_ms": median(seconds(plan) for _ in range(REPEATS)) * 1e3,
        "host_ms": host * 1e3,
    }


def peak() -> int:
    """Return the most memory that this process has had, in KiB. getrusage includes the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def seconds(plan: zerocast.CastPlan) -> float:
    start = time.perf_counter()
    plan.cast()
    return time.perf_counter() - start


def apart(ranks: int, weights: int, options: argparse.Namespace) -> dict[str, float | int | str]:
    """Measure in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.plan_build",
        "--json",
        "--cut",
        options.cut,
        "--format",
        options.format,
    ]
    command += ["--ranks", str(ranks), "--weights", str(weights)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows: list[dict[str, float | int | str]] = json.loads(found)
    return rows[0]


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--weights", type=int, nargs="*", default=WEIGHTS)
    parser.add_argument("--cut", choices=WORKLOADS, default="end to end")
    parser.add_argument("--format", default="fp8_block")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    most_ranks, most_weights = 2048, 44_544
    if len(options.ranks) == len(options.weights) == 1:
        rows = [measure(options.ranks[0], options.weights[0], options.cut, options.format)]
    else:
        points = [(ranks, most_weights) for ranks in options.ranks]
        points += [(most_ranks, weights) for weights in options.weights if weights != most_weights]
        rows = [apart(ranks, weights, options) for ranks, weights in points]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(
        "| ranks | weights | built in | peak memory beyond the weights | collectives, bytes | a cast | without its stages |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        carried = f"{row['collectives']}, {int(row['bytes']) / 1e6:.2f} MB"
        times = f"{row['cast_ms']:.1f} ms | {row['host_ms']:.3f} ms"
        print(
            f"| {row['ranks']:,} | {row['weights']:,} | {row['seconds']:.2f} s | {row['peak_mb']:.0f} MB | {carried} | {times} |"
        )


if __name__ == "__main__":
    main()
