"""Train the same GPT three times, with BF16, NVFP4 and FP8 weights, and compare: loss, bytes,
speed. Then kill and resume a short run, and show that its weights have the same bits.

    python -m examples.gpt_pretrain.demo                            # what `make demo` runs
    python -m examples.gpt_pretrain.demo --steps 1000 --lr 1e-3     # other options go to train.py

Each run is torchrun with two ranks on this host, the same seed and the same text. Written to
`demo_out`: loss.png, results.json and a folder per run with its metrics, TensorBoard files and
console. On a slow machine all runs get fewer steps, at least 100, and if these take too long, fewer
sequences per step; this is printed after a few steps. A run is ended only if it is silent, and the
runs that ended well are shown.
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
QUANTIZED_COST = 1.2  # a step with quantized weights over one in bf16, on a CPU
START_SECONDS = 12.0  # from launch to the first step, and from the last step to the end
PACE_STEPS = 4  # steps after which a run's speed is known
LEAST_STEPS = 100  # of a run, however slow the machine


@dataclass(frozen=True)
class DemoConfig:
    """Compare formats on one small model. Options that are not listed here go to train.py."""

    out: Path = Path("demo_out")
    """Folder for loss.png, results.json and the runs."""
    formats: tuple[Format, ...] = ("bf16", "nvfp4", "fp8_block")
    """Formats to train; the time of the first one decides the number of steps."""
    ranks: int = 2
    """Processes (ranks) of each run."""
    seconds: float = 130.0
    """Time for the runs that are compared; a machine that would need longer gets fewer steps."""
    proof: bool = True
    """Also kill and resume a short run, and compare the bits of its weights, in half a minute."""
    timeout: float = 120.0
    """Seconds of silence, without a step or a word, after which a run is ended as hung."""

    def __post_init__(self) -> None:
        for name, least in (("seconds", 1), ("timeout", 1), ("ranks", 1)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    def share(self, elapsed: float = 0.0) -> float:
        """Seconds that the first run may take, so that all fit into the time limit."""
        costs = [1.0 if name == "bf16" else QUANTIZED_COST for name in self.formats]
        return START_SECONDS + (self.seconds - elapsed - len(costs) * START_SECONDS) * costs[0] / sum(costs)


class TooSlowError(Exception):
    """The first run will exceed its share of the time.

    Attributes:
        pace: seconds per step.
        batch_size: sequences per step and rank, the option of `train.py`.
    """

    def __init__(self, pace: float, batch_size: int) -> None:
        super().__init__(pace, batch_size)
        self.pace = pace
        self.batch_size = batch_size


def affordable_steps(pace: float, seconds: float) -> int:
    """Return the number of steps of a run that takes `seconds` from its launch to its end."""
    return int((seconds - START_SECONDS) / pace)


def affordable_run(pace: float, batch_size: int, seconds: float) -> tuple[int, int]:
    """Return (steps, sequences per step and rank) of a run that takes at most `seconds`.

    A run has at least LEAST_STEPS steps. Sequences are halved until that many steps fit, and steps
    are not increased again: half the sequences take more than half the time. A single sequence may
    still take longer.
    """
    steps = max(affordable_steps(pace, seconds), LEAST_STEPS)
    while batch_size > 1 and affordable_steps(pace, seconds) < LEAST_STEPS:
        pace = pace / 2
        batch_size = batch_size // 2
    return steps, batch_size


def check_pace(records: Sequence[Record], seconds: float) -> None:
    """Raise TooSlowError as soon as the log shows that the run takes longer than `seconds`."""
    times = [record["step_seconds"] for record in records if record["event"] == "train"]
    if len(times) < PACE_STEPS or records[0]["config"]["steps"] <= LEAST_STEPS:
        return
    pace = min(times)  # the first step warms up, and other work on the machine comes and goes
    config = records[0]["config"]
    if affordable_steps(pace, seconds) < config["steps"]:
        raise TooSlowError(pace, config["batch_size"])


class Demo:
    """All runs of the demo, one at a time."""

    def __init__(
        self, config: DemoConfig, train_arguments: Sequence[str], progress: Progress, console: Console
    ) -> None:
        self._config, self._progress, self._console = config, progress, console
        self._arguments = [*DEFAULTS, *train_arguments]
        self._records: dict[str, list[Record]] = {}
        self._seconds: dict[str, float] = {}

    def results(self) -> report.Results | None:
        """Return the results of the runs that ended well, None if there are none."""
        return report.collect(self._records, self._seconds) if self._records else None

    def run(self) -> None:
        """Train every format. Raises RunFailedError with the console of a run that failed."""
        records, seconds = self._records, self._seconds
        began = time.monotonic()
        for i, name in enumerate(self._config.formats):
            try:
                records[name], seconds[name] = self._train(name, check_pace_within=None if i else self._config.share())
            except TooSlowError as slow:
                left = self._config.share(time.monotonic() - began)
                steps, batch_size = affordable_run(slow.pace, slow.batch_size, left)
                fewer = f" of {batch_size} sequences per rank" if batch_size < slow.batch_size else ""
                self._console.print(f"slow machine, {slow.pace:.2f} s a step: {steps} steps a run{fewer}")
                self._arguments += ["--steps", str(steps), "--batch-size", str(batch_size)]
                records[name], seconds[name] = self._train(name, check_pace_within=None)

    def _train(self, name: str, check_pace_within: float | None) -> tuple[list[Record], float]:
        self._progress.start(name)
        shutil.rmtree(self._config.out / name, ignore_errors=True)  # of an earlier demo
        began = time.monotonic()
        arguments = [*self._arguments, "--format", name]
        with Run(self._config.out / name, arguments, ranks=self._config.ranks, timeout=self._config.timeout) as run:
            while not run.is_over():
                self._progress.update(name, run.records())
                if check_pace_within is not None:
                    check_pace(run.records(), check_pace_within)
                time.sleep(0.2)
            records = run.records()
        self._progress.update(name, records)
        self._progress.stop(name)
        return records, time.monotonic() - began


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
            demo = Demo(config, train_arguments, progress, console)
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
