"""Train every run of the study that is not finished yet, then write table, picture and JSON.

    python -m examples.gpt_pretrain.study --size cpu
    python -m examples.gpt_pretrain.study --size h200

Ended in the middle, the same command goes on where it was: a finished run is not made again.
"""

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from examples.gpt_pretrain import interrupt
from examples.gpt_pretrain.launch import RunFailedError
from examples.gpt_pretrain.progress import Progress
from examples.gpt_pretrain.run_log import Record
from examples.gpt_pretrain.study import show
from examples.gpt_pretrain.study.outcome import collect
from examples.gpt_pretrain.study.plan import SIZES, Job, Size, jobs
from examples.gpt_pretrain.study.runs import finished, train


@dataclass(frozen=True)
class StudyConfig:
    """Compare the quality of training on quantized weights with bf16: six variants, three seeds
    each.
    """

    size: Literal["cpu", "h200"] = "cpu"
    """Size of the models (plan.py): cpu takes a minute or two a run on two cores, h200 is for
    one H200.
    """
    out: Path = Path("runs/study")
    """Folder for the runs, with a subfolder for each size."""
    results: Path | None = None
    """Folder for table.md, gap.png and results.json, with a subfolder for each size; by default
    `out`.
    """
    limit: int | None = None
    """Most runs to make now; the next call continues with the others."""


def make_runs(
    todo: Sequence[Job], out: Path, progress: Progress, limit: int | None = None
) -> Mapping[Job, Sequence[Record]]:
    """The records of all runs, or of fewer if `limit` new ones were made before the end."""
    made: dict[Job, Sequence[Record]] = {}
    for job in todo:
        records = finished(job, out)
        if records is None:
            if limit == 0:
                continue
            limit = None if limit is None else limit - 1
            records = train(job, out, progress)
        progress.update(job.name, records)
        progress.stop(job.name)
        made[job] = records
    return made


def write(name: str, size: Size, runs: Mapping[Job, Sequence[Record]], folder: Path) -> str:
    """Write table, picture and JSON; returns the table."""
    folder.mkdir(parents=True, exist_ok=True)
    outcome = collect(name, size, runs)
    (folder / "results.json").write_text(json.dumps(outcome) + "\n")
    (folder / "table.md").write_text(show.markdown(outcome, f"python -m examples.gpt_pretrain.study --size {name}"))
    show.plot(outcome, folder / "gap.png")
    return show.table(outcome)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study from the command line; returns the exit status."""
    config = tyro.cli(StudyConfig, prog="python -m examples.gpt_pretrain.study", args=arguments)
    console, size, out = Console(), SIZES[config.size], config.out / config.size
    todo = list(jobs(size))
    try:
        with Progress(console, [job.name for job in todo]) as progress:
            runs = make_runs(todo, out, progress, config.limit)
    except RunFailedError as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 1
    if len(runs) < len(todo):
        console.print(f"{len(runs)} of {len(todo)} runs are finished; the same command goes on", highlight=False)
        return 0
    folder = (config.results or config.out) / config.size
    console.print(write(config.size, size, runs, folder), markup=False, highlight=False)
    console.print(f"wrote table.md, gap.png and results.json in {folder}", highlight=False)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the run as well
    interrupt.run(main)
