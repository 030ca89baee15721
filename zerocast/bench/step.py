"""One run of the benchmark of training steps: every variant, compiled and eager, one at a time.

A row is a fresh model from the same seed. Its first steps warm up, on random tokens or on a text
whose losses the report keeps. Then come steps that start on idle devices, and steps that run
freely.
"""

import gc
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from zerocast.bench import machine
from zerocast.bench.config import StepConfig
from zerocast.bench.llama import SHAPES, Llama
from zerocast.bench.report import today
from zerocast.bench.step_report import Profile, StepFailure, StepMeasurement, StepReport
from zerocast.bench.variant import StepRow, Training, select
from zerocast.checkpoint.store import read_bounded
from zerocast.distributed.agreement import together
from zerocast.distributed.group import Group
from zerocast.metrics import TrafficCounter

# Steps over which the learning rate rises to its value.
LR_WARM_UP = 20
# Steps that are profiled.
PROFILED = 2
# Batches of random tokens, which steps take in turn.
BATCHES = 4
# The largest text that is read.
MAX_TEXT_BYTES = 2**30
# The name of the call in the error that is raised if ranks make different calls.
TRAINS = "trains a row"
Progress = Callable[[StepMeasurement | StepFailure], None]


@dataclass(frozen=True)
class Text:
    """A text to train on. A token is a byte, so a loss is in nats per byte and no tokenizer is
    needed.

    Attributes:
        name: the name of the file.
        sha256: the SHA-256 of the file, by which a report identifies it.
        tokens: uint8, one-dimensional.
    """

    name: str
    sha256: str
    tokens: Tensor

    @classmethod
    def read(cls, path: Path) -> "Text":
        """Read a file of up to 1 GiB."""
        content = read_bounded(path, MAX_TEXT_BYTES)
        tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return cls(path.name, hashlib.sha256(content).hexdigest(), tokens)

    def batches(self, steps: int, rank: int, ranks: int, shape: tuple[int, int], seed: int) -> Iterator[Tensor]:
        """Yield the tokens of one rank for each step, (batch, sequence + 1) for `shape`.

        Sequences come in a random order, drawn with `seed`. The last token of a sequence is only a
        label. Raises ValueError if the text is too short to use each byte at most once.
        """
        batch, sequence = shape
        count = (len(self.tokens) - 1) // sequence
        if count < steps * ranks * batch:
            raise ValueError(
                f"{self.name} has {len(self.tokens):,} bytes, which are {count:,} sequences of {sequence}; "
                f"{steps} steps of {batch} on {ranks} ranks need {steps * ranks * batch:,}"
            )
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        for step in range(steps):
            first = (step * ranks + rank) * batch
            starts = [number * sequence for number in order[first : first + batch]]
            yield torch.stack([self.tokens[start : start + sequence + 1] for start in starts]).long()


class StepBench:
    """A run over the default process group: the selected rows and the tokens to train on.

    Raises ValueError for an unknown variant or a text that is too short, RuntimeError for a variant
    that is not installed, OSError for a text that cannot be read.
    """

    def __init__(self, config: StepConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        # A rank that failed waits here for the others, which may wait in a collective of the row
        # until that times out. So this group has more patience.
        self._outcomes = Group.of(None).duplicate("gloo", patience=2)
        self._rows = select(config.variants, config.modes)
        self._text = Text.read(config.text) if config.text else None
        self._tokens = self._random_tokens()
        self._first_batches = self._batches_of_text(self._text) if self._text else self._in_turn(config.warm_up)

    def check_comparable(self, stored: StepReport) -> None:
        """Raise ValueError for a report that this run will not be compared with."""
        stored.check_comparable(self._world, self.settings())

    def run(self, progress: Progress = lambda _: None) -> StepReport:
        """Measure every row; `progress` is called with each result."""
        results = []
        for row in self._rows:
            results.append(self._attempt(row))
            self._free_memory()
            progress(results[-1])
        return StepReport(
            date=today(),
            ranks=self._world,
            tokens=self._world * self._sequences * self._config.seq,
            machine=machine.describe(self._device),
            settings=self.settings(),
            measurements=tuple(result for result in results if isinstance(result, StepMeasurement)),
            failures=tuple(result for result in results if isinstance(result, StepFailure)),
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings that rows depend on; reports with different settings are not
        compared.
        """
        irrelevant = ("variants", "modes", "out", "compare", "threshold", "json", "profile", "text")
        settings = {name: value for name, value in asdict(self._config).items() if name not in irrelevant}
        if self._text:
            settings["text"] = {"name": self._text.name, "bytes": len(self._text.tokens), "sha256": self._text.sha256}
        return settings

    def _attempt(self, row: StepRow) -> StepMeasurement | StepFailure:
        """Measure a row; an error on any rank becomes a StepFailure on all, so that the other rows
        still run.

        Ranks agree before the first step: building a model is the most likely step to fail on one
        rank only.
        """
        before = self._allocated()
        try:
            with row.products():
                training = together(self._outcomes, lambda: self._training(row), TRAINS)
                return together(self._outcomes, lambda: self._measure(row, training, before), TRAINS)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            return StepFailure(row.name, f"{type(error).__name__}: {reason}")

    def _free_memory(self) -> None:
        """Free the memory of a row: its model, the frames of an error, and compiled graphs."""
        torch._dynamo.reset()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _measure(self, row: StepRow, training: Training, before: int) -> StepMeasurement:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        losses = self._train(training)
        step_ms, host_ms, cpu_ms, kept_bytes = self._synchronized_steps(training)
        free_ms, free_host_ms = self._free_running_steps(training)
        peak = torch.cuda.max_memory_allocated(self._device) - before if self._device.type == "cuda" else None
        return StepMeasurement(
            variant=row.variant.name,
            mode=row.mode,
            step_ms=self._slowest(step_ms),
            host_ms=median(self._slowest(host_ms)),
            cpu_ms=median(self._slowest(cpu_ms)),
            free_ms=self._slowest([free_ms])[0],
            free_host_ms=self._slowest([free_host_ms])[0],
            peak_bytes=peak if peak is None else int(self._slowest([peak])[0]),
            kept_bytes=kept_bytes if kept_bytes is None else int(self._slowest([kept_bytes])[0]),
            wire_bytes=self._wire_bytes(training),
            losses=losses,
            profile=self._profile(training) if self._config.profile else None,
        )

    def _training(self, row: StepRow) -> Training:
        config = self._config
        torch.manual_seed(config.seed)
        with self._device:
            model = Llama(SHAPES[config.shape], config.layers, config.vocabulary, config.seq)

        def compile_block(block: nn.Module) -> None:
            # A fast recipe has compiled it. This does so again, by the compiler of this run.
            if row.mode == "compiled":
                mode = "reduce-overhead" if config.cuda_graphs else None
                block.compile(fullgraph=True, backend=config.compiler, mode=mode)

        training = row.train(model, config.lr, compile_block)
        if config.keep_gathered:
            training.keep_gathered()
        return training

    @property
    def _sequences(self) -> int:
        """The sequences of a step on this rank."""
        return self._config.batch * self._config.micro_batches

    def _batches_of_text(self, text: Text) -> list[Tensor]:
        config = self._config
        shape = self._sequences, config.seq
        return list(text.batches(config.loss_steps, self._rank, self._world, shape, config.seed))

    def _in_turn(self, steps: int) -> list[Tensor]:
        return [self._tokens[step % BATCHES] for step in range(steps)]

    def _random_tokens(self) -> list[Tensor]:
        config = self._config
        random = torch.Generator(self._device).manual_seed(config.seed + 1 + self._rank)
        shape = self._sequences, config.seq + 1
        return [torch.randint(config.vocabulary, shape, generator=random, device=self._device) for _ in range(BATCHES)]

    def _train(self, training: Training) -> list[float]:
        """Train on the first batches; returns the mean loss of all ranks for each step."""
        losses = []
        for step, tokens in enumerate(self._first_batches):
            for group in training.optimizer.param_groups:
                group["lr"] = self._config.lr * min(1.0, (step + 1) / LR_WARM_UP)
            losses.append(self._step(training, tokens.to(self._device)))
        mean = torch.stack(losses).float()
        dist.all_reduce(mean)
        mean_losses: list[float] = (mean / self._world).tolist()
        return mean_losses

    def _step(self, training: Training, tokens: Tensor, after_forward: Callable[[], object] = lambda: None) -> Tensor:
        """Step over `tokens` (sequences, sequence + 1) in micro-batches."""
        if self._config.cuda_graphs:
            # Once a step, since its micro-batches add to gradients that are outputs of graphs.
            torch.compiler.cudagraph_mark_step_begin()
        return training.step(tokens.chunk(self._config.micro_batches), after_forward)

    def _synchronized_steps(self, training: Training) -> tuple[list[float], list[float], list[float], int | None]:
        """Measure steps that start together on idle devices.

        Returns, for each step: the milliseconds until all work is done, those until its calls
        return on the CPU, and the processor time of all threads until then in milliseconds. Then
        the bytes that the forward pass of the last step left allocated; None on a CPU.
        """
        step_ms, host_ms, cpu_ms = [], [], []
        kept_bytes: int | None = None

        def after_forward() -> None:
            nonlocal kept_bytes
            kept_bytes = self._allocated() - before if self._device.type == "cuda" else None

        for tokens in self._in_turn(self._config.steps):
            self._synchronize()
            dist.barrier()
            before, start, start_cpu = self._allocated(), time.perf_counter(), time.process_time()
            self._step(training, tokens, after_forward)
            host_ms.append((time.perf_counter() - start) * 1e3)
            cpu_ms.append((time.process_time() - start_cpu) * 1e3)
            self._synchronize()
            step_ms.append((time.perf_counter() - start) * 1e3)
        return step_ms, host_ms, cpu_ms, kept_bytes

    def _free_running_steps(self, training: Training) -> tuple[float, float]:
        """Return the milliseconds per step, and of its calls on the CPU, when nothing waits between
        steps.
        """
        host_ms = []
        self._synchronize()
        dist.barrier()
        start = last = time.perf_counter()
        for tokens in self._in_turn(self._config.steps):
            self._step(training, tokens)
            host_ms.append((time.perf_counter() - last) * 1e3)
            last = time.perf_counter()
        self._synchronize()
        return (time.perf_counter() - start) * 1e3 / self._config.steps, median(host_ms)

    def _wire_bytes(self, training: Training) -> dict[str, int]:
        """Return the bytes of the collectives of one step, which runs eagerly to be seen."""
        with torch.compiler.set_stance("force_eager"), TrafficCounter(None) as traffic:
            self._step(training, self._tokens[0])
        return dict(sorted(traffic.nbytes.items()))

    def _profile(self, training: Training) -> Profile:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        with profile(activities=activities) as profiler:
            for tokens in self._in_turn(PROFILED):
                self._step(training, tokens)
            self._synchronize()
        return Profile.from_averages(profiler.key_averages(), PROFILED)

    def _slowest(self, values: list[float]) -> list[float]:
        """Return the largest of all ranks, for each value."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        maxima: list[float] = tensor.tolist()
        return maxima

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
