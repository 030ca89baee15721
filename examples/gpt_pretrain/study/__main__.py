"""Train every run of the study that is not finished yet, then write table, picture and JSON.

    python -m examples.gpt_pretrain.study --size cpu
    python -m examples.gpt_pretrain.study --size gpu --data text.bin --at-once 4 --minutes 3

If it was interrupted, the same command continues: a finished run is not made again.
"""

import hashlib
import json
import signal
import sys
import threading
import time
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
from examples.gpt_pretrain.study.runs import finished, read_store, train, write_store

STORE = "runs.jsonl"
Runs = Mapping[Job, Sequence[Record]]


@dataclass(frozen=True)
class StudyConfig:
    """Compare the quality of training on quantized weights with bf16, seed by seed."""

    size: Literal["cpu", "gpu", "pairs"] = "cpu"
    """Plan (plan.py): cpu needs a minute or two per run on two cores; gpu, pairs less on a GPU."""
    data: tuple[Path, ...] = ()
    """The text of the plan; by default the source of Python's standard library."""
    out: Path = Path("runs/study")
    """Folder for the runs and runs.jsonl, with a subfolder for each size."""
    results: Path | None = None
    """Folder for table.md, gap.png and results.json, with a subfolder for each size.
    By default the same as `out`.
    """
    rows: tuple[str, ...] = ()
    """Rows of the plan to make and to show; by default all of them."""
    limit: int | None = None
    """Most runs to make now; the next call continues with the others."""
    minutes: float | None = None
    """End after so long, with the runs that are under way; the next call continues."""
    at_once: int = 1
    """Runs at the same time, which share the GPUs."""
    gpus: int = 1
    """GPUs that runs are spread over, each run on one."""
    known: Path | None = None
    """A runs.jsonl from another machine, whose runs are not made again."""
    checkpoint_every: int = 0
    """Steps between two checkpoints, from which an interrupted run continues; 0 writes none."""


class Ended:
    """Decides when runs have to end: after `minutes`, if any, or once `now` was called."""

    def __init__(self, minutes: float | None = None) -> None:
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._now = threading.Event()

    def now(self) -> None:
        """End all runs before their next step."""
        self._now.set()

    def __call__(self, seconds: float = 0.0) -> bool:
        """Return True if a run may not continue for `seconds`."""
        return self._now.is_set() or (self._deadline is not None and time.monotonic() + seconds > self._deadline)


def make_runs(
    todo: Sequence[Job],
    out: Path,
    progress: Progress,
    limit: int | None = None,
    *,
    known: Mapping[str, list[Record]] | None = None,
    at_once: int = 1,
    gpus: int = 1,
    ended: Ended | None = None,
    failed: Callable[[RunFailedError], None],
) -> Runs:
    """Return the records of all runs, or of fewer if `limit` new ones were made first or the time
    was up. `failed` is called with the error of a run that fails, and the others continue.
    """
    environments: SimpleQueue[dict[str, str]] = SimpleQueue()
    for place in range(at_once):
        environments.put({"CUDA_VISIBLE_DEVICES": str(place % gpus)} if gpus > 1 else {})
    ended = ended or Ended()
    made: dict[Job, Sequence[Record] | None] = {job: finished(job, out, known) for job in todo}
    missing = [job for job in todo if made[job] is None][:limit]
    seconds: list[float] = []  # of the runs so far; one that cannot take as little is not begun

    def make(job: Job) -> Sequence[Record] | None:
        if ended(min(seconds, default=0.0)):
            return None
        began, environment = time.monotonic(), environments.get()
        try:
            records = train(job, out, progress, ended, environment)
            seconds.append(time.monotonic() - began)
            return records
        except RunFailedError as error:
            failed(error)
            return None
        finally:
            environments.put(environment)

    for job, records in made.items():
        if records is not None:
            progress.update(job.name, records)
            progress.stop(job.name)
    with ThreadPoolExecutor(at_once) as pool:
        futures = {job: pool.submit(make, job) for job in missing}
        try:
            for job, future in futures.items():
                made[job] = records = future.result()
                progress.update(job.name, records or [])
                progress.stop(job.name)
        except BaseException:  # Ctrl-C too: the runs end with this
            ended.now()
            pool.shutdown(cancel_futures=True)
            raise
    return {job: records for job, records in made.items() if records is not None}


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
    ended = Ended(config.minutes)
    console, size, out = Console(), _only(SIZES[config.size], config.rows), config.out / config.size
    every, todo = config.checkpoint_every, []
    for job in jobs(size):
        here = replace(job.config, data=config.data, checkpoint_every=every, elastic=every > 0)
        todo.append(replace(job, config=here))
    if config.limit != 0:
        check_text(size, config.data)
    failures: list[RunFailedError] = []
    with Progress(console, [job.name for job in todo]) as progress:
        runs = make_runs(
            todo,
            out,
            progress,
            config.limit,
            known=read_store(config.known),
            at_once=config.at_once,
            gpus=config.gpus,
            ended=ended,
            failed=failures.append,
        )
    for failure in failures:
        console.print(str(failure), markup=False, highlight=False, soft_wrap=True)
    if 0 < len(runs) < len(todo):
        console.print(f"{len(runs)} of {len(todo)} runs are finished; the same command continues", highlight=False)
    if any(job.variant == BASELINE for job in runs):
        folder = (config.results or config.out) / config.size
        out.mkdir(parents=True, exist_ok=True)
        write_store(out / STORE, runs)
        console.print(write(config.size, size, runs, folder), markup=False, highlight=False, soft_wrap=True)
        console.print(f"wrote table.md, gap.png and results.json in {folder}, {STORE} in {out}", highlight=False)
    return 1 if failures else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the run as well
    interrupt.run(main)
