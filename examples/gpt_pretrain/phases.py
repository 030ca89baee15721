"""Where the time of a step goes, phase by phase, for one weight format after another.

    torchrun --nproc-per-node 2 -m examples.gpt_pretrain.phases
    torchrun --nproc-per-node 2 -m examples.gpt_pretrain.phases --parallel fsdp2

Two looks at the same steps. The timeline is what passes on the device between marks around forward,
backward, norm and step, the median over many steps; reductions run within backward and end there.
The profile adds up what the kernels of each stage of the step take, by the operator that launched
them; a collective's kernel waits for the other ranks, and that counts. Under FSDP2 masters are cast
and gathered in the forward pass, and gathered once more in the backward pass.

On a CPU both are times of the calling thread: gloo works in threads of its own, so collectives show
up where they are waited for. Needs torch alone.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import zerocast
from examples.gpt_pretrain.build import Optimizer, build_model, build_optimizer
from examples.gpt_pretrain.config import Format, Parallel, TrainConfig
from examples.gpt_pretrain.data import Batch, Corpus
from examples.gpt_pretrain.measure import count_parameters, traffic_counter
from examples.gpt_pretrain.model import GPT, GPTConfig
from examples.gpt_pretrain.world import World

TIMELINE = ("forward", "backward", "norm", "step")  # backward: with the reduce-scatter
REST = "rest"
STAGES = {
    "zerocast::partial_amax": "Adam + amax",
    "zerocast::adam_amax": "Adam + amax",
    "zerocast::adam_step": "Adam + amax",
    "c10d::allreduce_": "all-reduce",
    "zerocast::compute_scales": "scales + cast",
    "zerocast::partial_cast": "scales + cast",
    "zerocast::roll_history": "scales + cast",
    "c10d::_allgather_base_": "all-gather",
    "zerocast::transpose": "columnwise",
    "zerocast::transposed": "columnwise",
}
REDUCE_SCATTER = "c10d::_reduce_scatter_base_"  # of the profile of backward
PHASES = (*dict.fromkeys(STAGES.values()), REST)
Moment = torch.cuda.Event | float
Results = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """The number of steps of each kind."""

    warm_up: int = 5
    timed: int = 20
    profiled: int = 5


def take_step(model: GPT, optimizer: Optimizer, batch: Batch, mark: Callable[[], None] = lambda: None) -> None:
    """One step of training; calls `mark` before, between and after the phases of `TIMELINE`."""
    mark()
    with record_function("forward"):
        loss = model.loss(batch.tokens, batch.targets)
    mark()
    with record_function("backward"):
        loss.backward()
    mark()
    with record_function("norm"):
        optimizer.clip_grad_norm_(1.0)
    mark()
    with record_function("step"):
        optimizer.step()
        optimizer.zero_grad()
    mark()


def measure(config: TrainConfig, world: World, corpus: Corpus, effort: Effort) -> Results:
    """Train a few steps; returns milliseconds and bytes a step on this rank."""
    model = build_model(config, world.device)
    optimizer = build_optimizer(model, config)
    batch = corpus.train_batch(
        config.batch_size, seed=config.seed, step=0, micro_step=0, rank=world.share(config.slices).rank
    )
    batch = batch.to(world.device)
    for _ in range(effort.warm_up):
        take_step(model, optimizer, batch)
    with traffic_counter(model) as traffic:
        take_step(model, optimizer, batch)
    timeline = _timeline(model, optimizer, batch, world.device, effort.timed)
    return {
        "parameters": count_parameters(model),
        "timeline_ms": timeline,
        "tokens_per_s": batch.tokens.numel() * world.share(config.slices).size / timeline["total"] * 1e3,
        "profile_ms": _profile(model, optimizer, batch, world.device, effort.profiled),
        "traffic_bytes": dict(sorted(traffic.nbytes.items())),
        "skipped_steps": optimizer.skipped_steps,
    }


def _timeline(model: GPT, optimizer: Optimizer, batch: Batch, device: torch.device, steps: int) -> dict[str, float]:
    """Median milliseconds between marks, without waiting for the device in between."""
    moments: list[Moment] = []

    def mark() -> None:
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            moments.append(event)
        else:
            moments.append(time.perf_counter())

    for _ in range(steps):
        take_step(model, optimizer, batch, mark)
    _synchronize(device)
    marks = len(TIMELINE) + 1
    by_step = [
        [_milliseconds(*pair) for pair in pairwise(moments[i : i + marks])] for i in range(0, len(moments), marks)
    ]
    medians = {name: statistics.median(times) for name, times in zip(TIMELINE, zip(*by_step, strict=True), strict=True)}
    return {**medians, "total": statistics.median(map(sum, by_step))}


def _milliseconds(start: Moment, end: Moment) -> float:
    if isinstance(start, float) or isinstance(end, float):
        return 1e3 * (float(end) - float(start))  # type: ignore[arg-type]
    elapsed: float = start.elapsed_time(end)
    return elapsed


def _profile(model: GPT, optimizer: Optimizer, batch: Batch, device: torch.device, steps: int) -> dict[str, float]:
    """Mean milliseconds of kernels a step; on a CPU, of operators."""
    _synchronize(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            take_step(model, optimizer, batch)
        _synchronize(device)
    total, own = ("device", "self_device") if device.type == "cuda" else ("cpu", "self_cpu")
    found: dict[str, float] = defaultdict(float)
    for event in profiler.events() or ():
        if event.device_type.name != "CPU":
            continue  # the copy of a range on the device's timeline
        if event.name in STAGES and not _is_within(event, "norm"):
            found[STAGES[event.name]] += getattr(event, f"{total}_time_total")
        elif event.name == "step":
            found[REST] += _rest(event, f"{own}_time_total")
        elif event.name == "norm":
            found["norm"] += getattr(event, f"{total}_time_total")
        elif event.name == REDUCE_SCATTER:
            found["reduce-scatter"] += getattr(event, f"{total}_time_total")
    return {name: found[name] / 1e3 / steps for name in ("reduce-scatter", "norm", *PHASES)}


def _is_within(event: Any, name: str) -> bool:
    while event.cpu_parent is not None:
        event = event.cpu_parent
        if event.name == name:
            return True
    return False


def _rest(event: Any, own: str) -> float:
    """Microseconds of a range in the trace that belong to no stage."""
    if event.name in STAGES:
        return 0.0
    return float(getattr(event, own)) + sum(_rest(child, own) for child in event.cpu_children)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(results: Results) -> str:
    """The phases down, the formats across, in Markdown; milliseconds, then megabytes."""
    runs: dict[str, Results] = results["formats"]
    rows = [("ms a step", list(runs)), ("---", ["---:"] * len(runs))]
    for part, title in (("timeline_ms", "{}"), ("profile_ms", "kernels: {}")):
        names = next(iter(runs.values()))[part]
        rows += [(title.format(name), [f"{run[part][name]:.3f}" for run in runs.values()]) for name in names]
    gathered = [run["traffic_bytes"].get("weight_gather", 0) / 1e6 for run in runs.values()]
    rows.append(("all-gather of weights, MB", [f"{megabytes:.1f}" for megabytes in gathered]))
    rows.append(("tokens/s, all ranks", [f"{run['tokens_per_s']:,.0f}" for run in runs.values()]))
    return "\n".join(f"| {name} | {' | '.join(cells)} |" for name, cells in rows)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m examples.gpt_pretrain.phases", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--formats", nargs="+", choices=get_args(Format), default=["bf16", "fp8_block", "nvfp4"])
    add("--parallel", choices=get_args(Parallel), default="zero")
    add("--layers", type=int, default=16, help="with --width 1024, 201 M parameters")
    add("--width", type=int, default=1024)
    add("--heads", type=int, default=16)
    add("--context", type=int, default=1024)
    add("--batch-size", type=int, default=8, help="sequences a rank")
    add("--bucket-size", type=int, default=1 << 24, help="parameters in one communication bucket")
    add("--steps", type=int, default=20, help="timed steps a format")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--out", type=Path, default=Path("runs/phases.json"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every format; rank 0 prints the table and writes the JSON."""
    chosen = _arguments(arguments)
    shape = GPTConfig(chosen.layers, chosen.heads, chosen.width, chosen.context)
    world = World.join(chosen.device)
    try:
        corpus, effort, runs = Corpus.load((), shape.context), Effort(timed=chosen.steps), {}
        for name in chosen.formats:
            config = TrainConfig(
                format=name,
                parallel=chosen.parallel,
                model=shape,
                batch_size=chosen.batch_size,
                bucket_size=chosen.bucket_size,
            )
            runs[name] = measure(config, world, corpus, effort)
        if world.rank == 0:
            _report(chosen, world, runs)
    finally:
        world.leave()


def _report(chosen: argparse.Namespace, world: World, runs: Results) -> None:
    cuda = world.device.type == "cuda"
    machine = {
        "ranks": world.size,
        "device": torch.cuda.get_device_name(world.device) if cuda else "cpu",
        "backend": zerocast.backends.choose(world.device),
        "torch": torch.__version__,
    }
    settings = {name: value for name, value in vars(chosen).items() if name != "out"}
    results = {"machine": machine, "settings": settings, "formats": runs}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(results, indent=1) + "\n")
    count = next(iter(runs.values()))["parameters"]
    print(f"{machine}, {count / 1e6:.1f} M parameters\n\n{table(results)}\n\n{chosen.out}", flush=True)


if __name__ == "__main__":
    main()
