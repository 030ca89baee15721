"""`zerocast bench`: the benchmarks of a cast and of a training step, as a table on the screen and a
report in a folder.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerocast.bench.config import BenchConfig, StepConfig
from zerocast.bench.render import legend, markdown, step_markdown
from zerocast.bench.report import Regression, Report, regressions, stored_ratios
from zerocast.bench.run import Bench
from zerocast.bench.step import StepBench
from zerocast.bench.step_report import StepFailure, StepMeasurement, StepReport
from zerocast.cli import print_error
from zerocast.cli.output import Progress, written


def cast(config: BenchConfig) -> int:
    """Run `zerocast bench`; returns the exit status."""
    try:
        stored = stored_ratios(config.compare) if config.compare else {}
        runner = Bench(config)
    except (OSError, RuntimeError, ValueError) as error:
        print_error(f"zerocast bench: {error}")
        return 2
    if not config.json:
        print("\n".join([*legend(runner.rows), ""]), flush=True)
    progress = Progress()
    report = runner.run(progress.say)
    progress.clear()
    _publish(report, markdown(report), config.json, config.out, report.backend)
    grown = regressions(report, stored, config.threshold)
    return _status(grown, report.failed)


def step(config: StepConfig) -> int:
    """Run `zerocast bench step`; returns the exit status."""
    try:
        stored = StepReport.read(config.compare) if config.compare else None
        with _joined() as device:
            is_first = dist.get_rank() == 0
            runner = StepBench(config, device)
            if stored:
                runner.check_comparable(stored)
            report = runner.run(_step_progress if is_first else lambda _: None)
            grown = report.regressions(stored, config.threshold) if stored else []
    except (OSError, RuntimeError, ValueError) as error:
        print_error(f"zerocast bench step: {error}")
        return 2
    if is_first:
        _publish(report, step_markdown(report), config.json, config.out, f"step-x{report.ranks}")
    return _status(grown if is_first else [], report.failed)


def _status(grown: list[Regression], failed: bool) -> int:
    for regression in grown:
        _say(f"regression: {regression}")
    return 1 if grown or failed else 0


def _publish(report: Report | StepReport, text: str, as_json: bool, folder: Path | None, subject: str) -> None:
    """Print a report, as `text` or as JSON, and write both into files of a folder, if there is one,
    named by date, device and `subject`.
    """
    data = json.dumps(report.as_dict(), indent=1)
    print(data if as_json else text)
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    device = "-".join(str(report.machine["device"]).lower().split())
    stem = f"{report.date}-{''.join(c for c in device if c.isalnum() or c == '-')}-{subject}"
    for suffix, content in (("json", f"{data}\n"), ("md", text)):
        file = folder / f"{stem}.{suffix}"
        with written(file) as path:
            path.write_text(content)
        _say(f"wrote {file}")


def _step_progress(result: StepMeasurement | StepFailure) -> None:
    outcome = f"{result.ms:9.1f} ms" if isinstance(result, StepMeasurement) else f"not measured: {result.reason}"
    _say(f"{result.row:<48} {outcome}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _joined() -> Iterator[torch.device]:
    """Yield this rank's device, inside the default process group.

    The group uses NCCL if every rank of the host has a GPU, otherwise gloo. Without torchrun the
    group has only this process.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    use_cuda = torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    single_process: dict[str, Any] = {}
    if "RANK" not in os.environ:
        single_process = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if use_cuda else "gloo", device_id=device if use_cuda else None, **single_process)
    try:
        yield device
    finally:
        dist.destroy_process_group()
