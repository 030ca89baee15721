"""Train the same GPT three times, with BF16, NVFP4 and FP8 weights, and compare: loss, bytes,
speed. Then kill and resume a short run, and show that its weights have the same bits.

    python -m examples.gpt_pretrain.demo                            # what `make demo` runs
    python -m examples.gpt_pretrain.demo --steps 1000 --lr 1e-3     # other options go to train.py

Each run is torchrun with two ranks on this host, the same seed and the same text. Written to
`demo_out`: loss.png, results.json and a folder per run with its metrics, TensorBoard files and
console. On a slow machine pass fewer steps, such as `--steps 100`. A run is ended only if it is
silent, and the runs that ended well are shown.
"""

import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from examples.gpt_pretrain import interrupt, proof, report
from examples.gpt_pretrain.config import Format, options
from examples.gpt_pretrain.launch import Run, RunFailedError
from examples.gpt_pretrain.progress import Progress
from examples.gpt_pretrain.run_log import Record

DEFAULTS = ["--steps", "300", "--device", "cpu"]  # for train.py; the command line overrides them


@dataclass(frozen=True)
class DemoConfig:
    """Compare formats on one small model. Options that are not listed here go to train.py."""

    out: Path = Path("demo_out")
    """Folder for loss.png, results.json and the runs."""
    formats: tuple[Format, ...] = ("bf16", "nvfp4", "fp8_block")
    """Formats to train."""
    ranks: int = 2
    """Processes (ranks) of each run."""
    proof: bool = True
    """Also kill and resume a short run, and compare the bits of its weights, in half a minute."""
    timeout: float = 120.0
    """Seconds of silence, without a step or a word, after which a run is ended as hung."""

    def __post_init__(self) -> None:
        for name in ("timeout", "ranks"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Demo:
    """All runs of the demo, one at a time."""

    def __init__(self, config: DemoConfig, train_arguments: Sequence[str], progress: Progress) -> None:
        self._config, self._progress = config, progress
        self._arguments = [*DEFAULTS, *train_arguments]
        self._records: dict[str, list[Record]] = {}
        self._seconds: dict[str, float] = {}

    def results(self) -> report.Results | None:
        """Return the results of the runs that ended well, None if there are none."""
        return report.collect(self._records, self._seconds) if self._records else None

    def run(self) -> None:
        """Train every format. Raises RunFailedError with the console of a run that failed."""
        for name in self._config.formats:
            self._progress.start(name)
            shutil.rmtree(self._config.out / name, ignore_errors=True)  # of an earlier demo
            began = time.monotonic()
            arguments = [*self._arguments, "--format", name]
            with Run(self._config.out / name, arguments, ranks=self._config.ranks, timeout=self._config.timeout) as run:
                while not run.is_over():
                    self._progress.update(name, run.records())
                    time.sleep(0.2)
                self._records[name] = run.records()
            self._seconds[name] = time.monotonic() - began
            self._progress.update(name, self._records[name])
            self._progress.stop(name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo from the command line; returns the exit status."""
    config, train_arguments = tyro.cli(
        DemoConfig, prog="python -m examples.gpt_pretrain.demo", args=arguments, return_unknown_args=True
    )
    options([*DEFAULTS, *train_arguments])  # ends here for what every run would reject
    console = Console()
    status, demo = 0, None
    try:
        with Progress(console, config.formats) as progress:
            demo = Demo(config, train_arguments, progress)
            demo.run()
    except RunFailedError as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        status = 1
    results = demo.results() if demo else None
    if results is None:
        return status
    console.print(report.table(results))
    if config.proof and not status:
        console.print("killing and resuming a short run ...", highlight=False)
        try:
            results["weights_sha256"] = proof.prove(
                config.out / "proof", [*DEFAULTS, *train_arguments], config.ranks, config.timeout
            )
            console.print(proof.table(results["weights_sha256"]))
            status = int(len(set(results["weights_sha256"].values())) > 1)
        except RunFailedError as error:
            console.print(str(error), markup=False, highlight=False, soft_wrap=True)
            status = 1
    report.write_json(results, config.out / "results.json")
    report.plot(results, config.out / "loss.png")
    console.print(f"wrote {config.out / 'loss.png'} and {config.out / 'results.json'}", highlight=False)
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the run as well
    interrupt.run(main)
