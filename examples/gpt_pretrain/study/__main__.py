"""Train every run of the study that is not finished yet, then write table, picture and JSON.

    python -m examples.gpt_pretrain.study --size cpu
    python -m examples.gpt_pretrain.study --size gpu --data text.bin --at-once 4

If it was interrupted, the same command continues: a finished run is not made again.
"""

import hashlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import tyro
from rich.console import Console

from examples.gpt_pretrain import interrupt
from examples.gpt_pretrain.data import read_files
from examples.gpt_pretrain.launch import RunFailedError
from examples.gpt_pretrain.progress import Progress
from examples.gpt_pretrain.run_log import Record
from examples.gpt_pretrain.study import show
from examples.gpt_pretrain.study.outcome import collect
from examples.gpt_pretrain.study.plan import BASELINE, SIZES, Job, Size, jobs
from examples.gpt_pretrain.study.runs import finished, train

Runs = Mapping[Job, Sequence[Record]]


@dataclass(frozen=True)
class StudyConfig:
    """Compare the quality of training on quantized weights with bf16, seed by seed."""

    size: Literal["cpu", "gpu", "pairs"] = "cpu"
    """Plan (plan.py): cpu needs a minute or two per run on two cores; gpu, pairs less on a GPU."""
    data: tuple[Path, ...] = ()
    """The text of the plan; by default the source of Python's standard library."""
    out: Path = Path("runs/study")
    """Folder for the runs, with a subfolder for each size."""
    results: Path | None = None
    """Folder for table.md, gap.png and results.json, with a subfolder for each size.
    By default the same as `out`.
    """
    rows: tuple[str, ...] = ()
    """Rows of the plan to make and to show; by default all of them."""
    at_once: int = 1
    """Runs at the same time, which share the GPUs."""
    gpus: int = 1
    """GPUs that runs are spread over, each run on one."""


def make_runs(
    todo: Sequence[Job],
    out: Path,
    progress: Progress,
    at_once: int,
    gpus: int,
    failed: Callable[[RunFailedError], None],
) -> Runs:
    """Return the records of all runs that end well; those that are missing are made. `failed` is
    called with the error of a run that fails, and the others continue.
    """
    environments: SimpleQueue[dict[str, str]] = SimpleQueue()
    for place in range(at_once):
        environments.put({"CUDA_VISIBLE_DEVICES": str(place % gpus)} if gpus > 1 else {})
    # Set on Ctrl-C, at which the runs end.
    ended = threading.Event()

    def make(job: Job) -> Sequence[Record] | None:
        environment = environments.get()
        try:
            return finished(job, out) or train(job, out, progress, ended.is_set, environment)
        except RunFailedError as error:
            failed(error)
            return None
        finally:
            environments.put(environment)

    made: dict[Job, Sequence[Record]] = {}
    with ThreadPoolExecutor(at_once) as pool:
        futures = {job: pool.submit(make, job) for job in todo}
        try:
            for job, future in futures.items():
                records = future.result()
                progress.update(job.name, records or [])
                progress.stop(job.name)
                if records is not None:
                    made[job] = records
        except BaseException:
            ended.set()
            pool.shutdown(cancel_futures=True)
            raise
    return made


def write(name: str, size: Size, runs: Runs, folder: Path) -> str:
    """Write table, picture and JSON; returns the table."""
    folder.mkdir(parents=True, exist_ok=True)
    outcome = collect(name, size, runs)
    (folder / "results.json").write_text(json.dumps(outcome) + "\n")
    (folder / "table.md").write_text(show.markdown(outcome, f"python -m examples.gpt_pretrain.study --size {name}"))
    show.plot(outcome, folder / "gap.png")
    return show.table(outcome)


def check_text(size: Size, data: Sequence[Path]) -> None:
    """SystemExit unless `data` is the text of a plan that names one."""
    if size.text is None:
        return
    try:
        text = read_files(data)
    except OSError as error:
        raise SystemExit(f"--data: {error}") from None
    found = hashlib.sha256(text).hexdigest()
    if found != size.text:
        raise SystemExit(
            f"the plan has a text of SHA-256 {size.text}, and --data gives {len(text):,} bytes of {found}: README.md says "
            "how to make it"
        )


def _only(size: Size, rows: Sequence[str]) -> Size:
    """Return the plan with only these rows, or unchanged if there are none. Raises SystemExit for
    unknown rows.
    """
    unknown = sorted(set(rows) - size.variants.keys())
    if unknown:
        raise SystemExit(f"--rows: the plan has {', '.join(map(repr, size.variants))}, and not {unknown[0]!r}")
    variants = {name: options for name, options in size.variants.items() if name in rows}
    return replace(size, variants=variants) if rows else size


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study from the command line; returns the exit status."""
    config = tyro.cli(StudyConfig, prog="python -m examples.gpt_pretrain.study", args=arguments)
    console, size, out = Console(), _only(SIZES[config.size], config.rows), config.out / config.size
    check_text(size, config.data)
    todo = [replace(job, config=replace(job.config, data=config.data)) for job in jobs(size)]
    failures: list[RunFailedError] = []
    with Progress(console, [job.name for job in todo]) as progress:
        runs = make_runs(todo, out, progress, config.at_once, config.gpus, failures.append)
    for failure in failures:
        console.print(str(failure), markup=False, highlight=False, soft_wrap=True)
    if 0 < len(runs) < len(todo):
        console.print(f"{len(runs)} of {len(todo)} runs are finished; the same command continues", highlight=False)
    if any(job.variant == BASELINE for job in runs):
        folder = (config.results or config.out) / config.size
        console.print(write(config.size, size, runs, folder), markup=False, highlight=False, soft_wrap=True)
        console.print(f"wrote table.md, gap.png and results.json in {folder}", highlight=False)
    return 1 if failures else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the run as well
    interrupt.run(main)
