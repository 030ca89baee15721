"""The loss of 200 steps on a text, for every variant of `zerocast bench step` that is timed, seed by seed.

    torchrun --nproc-per-node 2 -m tests.benchmarks.loss_study text.txt --out losses.jsonl
    python -m tests.benchmarks.loss_study --table losses.jsonl

Each run becomes a line of the file as soon as it ends, and runs that are there are not repeated: what a time limit cuts is one run.
Variants of one seed start from the same values and see the same tokens in the same order, no byte twice, so each batch is held out
until it is trained on, and losses are compared batch by batch. The order of the runs is `PLAN`'s: the question of FP8 weight
gradients first, on three seeds.
"""

import argparse
import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import torch.distributed as dist

from zerocast.bench.config import StepConfig
from zerocast.bench.step import StepBench
from zerocast.bench.step_report import StepFailure, StepMeasurement

CONFIG = {"shape": "llama3-1b", "layers": 4, "vocabulary": 256, "seq": 2048, "batch": 6, "lr": 3e-4, "steps": 2}
LAST = 50  # steps whose losses are compared
WGRAD, WIRE = "+fp8_wgrad", "+fp8_wire"
QUESTION = ("bf16", "fp8_current", f"fp8_current{WGRAD}", "fp8_block", f"fp8_block{WGRAD}")
OTHERS = (
    *("fp8_delayed", f"fp8_delayed{WGRAD}", "mxfp4", f"mxfp4{WGRAD}", "nvfp4", "mxfp8:block=32x32"),
    *(f"bf16{WIRE}", f"fp8_current{WGRAD}{WIRE}", f"nvfp4{WIRE}"),
)


def rows(host: str, names: tuple[str, ...], mode: str = "eager") -> tuple[str, ...]:
    """Return the rows of `zerocast bench step` of a host."""
    return tuple(f"{host}:{name} {mode}" for name in names)


TORCHAO = rows("torchao", ("tensorwise",))
COMPILED = (
    *rows("fsdp2", ("bf16", f"fp8_current{WGRAD}", f"fp8_block{WGRAD}", "nvfp4"), "compiled"),
    *rows("torchao", ("tensorwise",), "compiled"),
)
PLAN = (
    *((seed, rows("fsdp2", QUESTION) + TORCHAO) for seed in (0, 1, 2)),
    (0, rows("fsdp2", OTHERS)),
    (0, rows("zero_adamw", QUESTION)),
    (0, COMPILED),
    (0, rows("zero_adamw", OTHERS)),
    *((seed, rows("fsdp2", OTHERS)) for seed in (1, 2)),
    *((seed, rows("zero_adamw", QUESTION + OTHERS)) for seed in (1, 2)),
)


PLACES = {run: place for place, run in enumerate((seed, row) for seed, names in PLAN for row in names)}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file, whose last line may be cut."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Train what is in `PLAN` and not in the file; rank 0 appends to it."""
    done = {(run["seed"], run["row"]) for run in read(options.out)}
    dist.barrier()
    alone = dist.get_world_size() == 1  # nothing travels, so nothing is rounded on its way
    number, among = options.part
    for seed, names in PLAN:
        asked = (name for name in names if any(fnmatchcase(name, pattern) for pattern in options.only))
        chosen = [name for name in asked if not (WIRE in name and alone)]
        missing = tuple(name for name in chosen if (seed, name) not in done and PLACES[seed, name] % among == number)
        if seed not in options.seeds or not missing:
            continue
        done |= {(seed, name) for name in missing}
        config = StepConfig(
            missing, seed=seed, text=options.text, loss_steps=options.loss_steps, **{**CONFIG, **options.config}
        )
        bench = StepBench(config, device)
        settings = {"ranks": dist.get_world_size(), **bench.settings()}

        def note(result: StepMeasurement | StepFailure, settings: dict[str, Any] = settings) -> None:
            line = {"seed": settings["seed"], "row": result.row}
            if isinstance(result, StepFailure):
                line |= {"failure": result.reason}
            else:
                line |= {"losses": result.losses, "ms": result.ms, "settings": settings}
            if dist.get_rank() == 0:
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"seed {line['seed']} {line['row']}: {line.get('failure') or line['losses'][-1]}", flush=True)

        bench.run(note)


Losses = dict[str, dict[int, list[float]]]  # of the last steps, by row and seed


def last(runs: list[dict[str, Any]]) -> Losses:
    """Return the losses of the last steps of each run that did not fail."""
    found: Losses = {}
    for run in runs:
        if "losses" in run:
            found.setdefault(run["row"], {})[run["seed"]] = run["losses"][-LAST:]
    return found


def distances(found: Losses, row: str, other: str) -> list[float]:
    """Return how far the mean loss of a row is above that of another one, seed by seed."""
    theirs = found.get(other, {})
    return [fmean(found[row][seed]) - fmean(theirs[seed]) for seed in sorted(found[row].keys() & theirs.keys())]


def described(values: list[float]) -> str:
    """Return cells: each value, their mean, and their deviation between seeds."""
    if not values:
        return " | | "
    spread = f"{stdev(values):.4f}" if len(values) > 1 else ""
    return f"{', '.join(f'{value:+.4f}' for value in values)} | {fmean(values):+.4f} | {spread}"


def table(runs: list[dict[str, Any]]) -> Iterator[str]:
    """Yield Markdown: mean losses seed by seed and distances to FSDP2's bf16, and of FP8 gradients to nominal ones."""
    found = last(runs)
    yield from ("| row | loss, seed by seed | to bf16 | mean | between seeds |", "| --- | --- | --- | ---: | ---: |")
    for row, seeds in found.items():
        each = ", ".join(f"{fmean(seeds[seed]):.4f}" for seed in sorted(seeds))
        yield f"| {row} | {each} | {described(distances(found, row, 'fsdp2:bf16 eager'))} |"
    yield from (f"| {run['row']} | {run['failure']} | | | |" for run in runs if "failure" in run)
    for option, title in ((WGRAD, "FP8 weight gradients of"), (WIRE, "gradients sent as FP8 of")):
        yield from ("", f"| {title} | to nominal ones | mean | between seeds |", "| --- | --- | ---: | ---: |")
        for row in found:
            if option in row and (pair := distances(found, row, row.replace(option, ""))):
                yield f"| {row.replace(option, '')} | {described(pair)} |"


def main() -> None:
    """Train, or print the table of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path("losses.jsonl"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=["*"], help="shell patterns of rows")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), help="of so many processes, each with its own --out"
    )
    parser.add_argument("--loss-steps", type=int, default=200)
    parser.add_argument("--config", type=json.loads, default={}, help="JSON of other options of StepConfig")
    parser.add_argument("--table", type=Path, nargs="+")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table([run for path in options.table for run in read(path)])))
        return
    if options.text is None:
        parser.error("a text is needed")
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    train(options, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
