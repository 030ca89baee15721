"""The runs of a study on disk; a finished run is not repeated."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.gpt_pretrain.config import TrainConfig
from examples.gpt_pretrain.launch import Run
from examples.gpt_pretrain.progress import Progress
from examples.gpt_pretrain.run_log import Record, read_records
from examples.gpt_pretrain.study.plan import Job

TIMEOUT = 3600.0  # seconds after which a run is ended as hung
PLACE = ("out", "data")  # fields of a configuration that change no bit of a run


def finished(job: Job, out: Path) -> list[Record] | None:
    """Return the records of a finished run below `out` with the configuration of `job`, or None."""
    records = read_records(out / job.name / "metrics.jsonl")
    if not records or records[-1]["event"] != "end":
        return None
    start = records[0]
    same = _without_place(start["config"]) == _without_place(_as_recorded(job.config)) and start["ranks"] == job.ranks
    return records if same else None


def train(
    job: Job,
    out: Path,
    progress: Progress,
    stop: Callable[[], bool] = lambda: False,
    environment: Mapping[str, str] | None = None,
) -> list[Record] | None:
    """Make one run from its beginning and return its records, or None if `stop` ends it first;
    RunFailedError if it fails.
    """
    progress.start(job.name)
    folder = out / job.name
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    run = Run(
        folder,
        command_line(job.config),
        ranks=job.ranks,
        timeout=TIMEOUT,
        torchrun=job.ranks > 1,
        environment=environment,
    )
    with run:
        while not run.is_over():
            if stop():
                return None
            progress.update(job.name, run.records())
            time.sleep(0.5)
        return run.records()


def command_line(config: TrainConfig) -> list[str]:
    """Return the options of train.py for this configuration, without `--out`, which the caller
    adds.
    """
    return [
        word for name, value in _flatten(dataclasses.asdict(config)) if name != "out" for word in _option(name, value)
    ]


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _option(name: str, value: Any) -> Sequence[str]:
    group, _, field = name.replace("_", "-").rpartition(".")
    prefix = f"--{group}." if group else "--"
    if isinstance(value, bool):
        return [prefix + ("" if value else "no-") + field]
    if isinstance(value, tuple):
        return [prefix + field, *map(str, value)] if value else []
    return [prefix + field, str(value)]


def _as_recorded(config: TrainConfig) -> Any:
    """Return a configuration as the log of a run stores it."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def _without_place(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in PLACE}
