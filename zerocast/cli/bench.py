"""`zerocast bench`: the benchmarks of a cast and of a training step, as a table on the screen and a
report in a folder.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerocast.bench.config import BenchConfig, StepConfig
from zerocast.bench.render import legend, markdown, plot, step_markdown, step_plot, terminal
from zerocast.bench.report import Regression, Report, regressions, stored_ratios
from zerocast.bench.run import Bench
from zerocast.bench.step import StepBench
from zerocast.bench.step_report import StepFailure, StepMeasurement, StepReport
from zerocast.cli import interrupts
from zerocast.cli.output import Progress, written


def cast(config: BenchConfig) -> int:
    """Run `zerocast bench`; returns the exit status."""
    try:
        stored = stored_ratios(config.compare) if config.compare else {}
        runner = Bench(config)
    except (OSError, RuntimeError, ValueError) as error:
        interrupts.print_error(f"zerocast bench: {error}")
        return 2
    if not config.json:
        print("\n".join(legend(runner.rows)), flush=True)
    progress = Progress()
    report = runner.run(progress.say)
    progress.clear()
    print(json.dumps(report.as_dict(), indent=1) if config.json else "\n".join(["", *terminal(report)]))
    if config.out is not None:
        _write(report, markdown(report), plot, config.out, report.backend)
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
        interrupts.print_error(f"zerocast bench step: {error}")
        return 2
    if is_first:
        print(json.dumps(report.as_dict(), indent=1) if config.json else step_markdown(report))
        if config.out is not None:
            _write(report, step_markdown(report), step_plot, config.out, f"step-x{report.ranks}")
    return _status(grown if is_first else [], report.failed)


def _status(grown: list[Regression], failed: bool) -> int:
    for regression in grown:
        _say(f"regression: {regression}")
    return 1 if grown or failed else 0


AnyReport = TypeVar("AnyReport", Report, StepReport)


def _write(report: AnyReport, text: str, draw: Callable[[AnyReport, Path], None], folder: Path, subject: str) -> None:
    """Write JSON, Markdown and PNG files, named by date, device and `subject`."""
    folder.mkdir(parents=True, exist_ok=True)
    device = "-".join(str(report.machine["device"]).lower().split())
    stem = f"{report.date}-{''.join(c for c in device if c.isalnum() or c == '-')}-{subject}"
    data_file, page_file, picture_file = (folder / f"{stem}.{suffix}" for suffix in ("json", "md", "png"))
    with written(data_file) as path:
        report.write_json(path)
    with written(page_file) as path:
        path.write_text(text)
    with written(picture_file) as path:
        draw(report, path)
    for path in (data_file, page_file, picture_file):
        _say(f"wrote {path}")


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
