"""The runs of a study on disk; a finished run is not repeated.

The records of runs can be copied between machines as one file (`write_store`), so that a study can
run in slices of time on several.
"""

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
PLACE = ("out", "data", "elastic", "checkpoint_every")  # fields of a configuration that change no bit of a run


def write_store(path: Path, runs: Mapping[Job, Sequence[Record]]) -> None:
    """Write the records of finished runs into one file, one line per run."""
    lines = [json.dumps({"name": job.name, "records": list(records)}) + "\n" for job, records in runs.items()]
    path.write_text("".join(lines))


def read_store(path: Path | None) -> dict[str, list[Record]]:
    """Return a dict from name of a run in a store to its records; empty without a file."""
    if path is None or not path.exists():
        return {}
    return {line["name"]: line["records"] for line in map(json.loads, path.read_text().splitlines())}


def finished(job: Job, out: Path, known: Mapping[str, list[Record]] | None = None) -> list[Record] | None:
    """Return the records of a finished run below `out`, or in the store `known`, with the
    configuration of `job`, or None.
    """
    records = read_records(out / job.name / "metrics.jsonl")
    if not records or records[-1]["event"] != "end":
        records = (known or {}).get(job.name, [])
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
    if not job.config.elastic:  # which continues from a checkpoint of an earlier attempt
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
