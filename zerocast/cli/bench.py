"""`zerocast bench`: the benchmark, its table on the screen and its report in a folder."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import tyro

from zerocast.bench import Bench, BenchConfig, Report
from zerocast.bench.measurement import Failure, Measurement
from zerocast.bench.render import markdown, plot
from zerocast.bench.report import regressions, stored_ratios
from zerocast.bench.trace import write_trace
from zerocast.cli.files import written


def bench(config: tyro.conf.OmitArgPrefixes[BenchConfig]) -> int:
    """Time casts, Adam steps and columnwise copies beside a copy of memory, and beside
    TransformerEngine where it is installed.

    Prints a Markdown table and writes it with JSON and a plot.

    Example: zerocast bench --only "A cast" --compare stored.json

    Exit status: 0; 1 if a row of ours fails or grew by more than the threshold; 2 for options that
    cannot be met.
    """
    if config.trace is not None:
        return _trace(config.trace, config)
    try:
        stored = stored_ratios(config.compare) if config.compare else {}
        runner = Bench(config)
    except (OSError, RuntimeError, ValueError) as error:
        _say(f"zerocast bench: {error}")
        return 2
    report = runner.run(_progress)
    print(json.dumps(report.as_dict(), indent=1) if config.json else markdown(report))
    for path in _write(report, config.out):
        _say(f"wrote {path}")
    grown = regressions(report, stored, config.threshold)
    for regression in grown:
        _say(f"regression: {regression}")
    return 1 if grown or report.failed else 0


def _trace(path: Path, config: BenchConfig) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _joined() as device:
        found = write_trace(path, device, config.scale or 1, backend=config.backend)
    if found is not None:
        share = found.hidden / found.gathered if found.gathered else 0.0
        _say(f"wrote {path}: {found.gathered:,.0f} us of all-gather, {share:.0%} of it while something else ran")
    return 0


def _write(report: Report, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    device = "-".join(str(report.machine["device"]).lower().split())
    stem = f"{report.date}-{''.join(c for c in device if c.isalnum() or c == '-')}-{report.backend}"
    data, text, picture = (folder / f"{stem}.{suffix}" for suffix in ("json", "md", "png"))
    with written(data) as path:
        report.write_json(path)
    with written(text) as path:
        path.write_text(markdown(report))
    with written(picture) as path:
        plot(report, path)
    return [data, text, picture]


def _progress(result: Measurement | Failure) -> None:
    what = f"{result.ms:9.3f} ms" if isinstance(result, Measurement) else f"not measured: {result.reason}"
    _say(f"{result.row.name:<32} {result.by:<20} {what}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _joined() -> Iterator[torch.device]:
    """Yield this rank's device, inside the default process group that torchrun asks for.

    The group uses NCCL if every rank of the host has a GPU, else gloo. Without torchrun there is
    none.
    """
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    use_cuda = torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        yield device
        return
    dist.init_process_group("nccl" if use_cuda else "gloo", device_id=device if use_cuda else None)
    try:
        yield device
    finally:
        dist.destroy_process_group()
