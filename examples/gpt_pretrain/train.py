"""Pre-train the GPT: build, quantize, train, validate, log, checkpoint. One process or torchrun,
CPU or CUDA.

    python -m examples.gpt_pretrain.train --format nvfp4
    torchrun --nproc-per-node 2 -m examples.gpt_pretrain.train --format nvfp4 --checkpoint-every 100
    torchrun --nproc-per-node 2 -m examples.gpt_pretrain.train --format nvfp4 --parallel fsdp2

`build.py` shows quantized training, and `fsdp2.py` FSDP2. The rest is an ordinary training loop.
"""

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timezone

import torch
from torch import Tensor

import zerocast
from examples.gpt_pretrain import checkpoint, interrupt
from examples.gpt_pretrain.build import Optimizer, Zero, build_model, build_optimizer, forget_masters, recipe
from examples.gpt_pretrain.config import PROGRAM, TrainConfig, options
from examples.gpt_pretrain.data import Batch, Corpus
from examples.gpt_pretrain.measure import (
    bytes_per_parameter,
    count_parameters,
    digest_of_weights,
    products,
    traffic_counter,
)
from examples.gpt_pretrain.model import GPT
from examples.gpt_pretrain.run_log import Record, RunLog
from examples.gpt_pretrain.world import World
from zerocast.bench import machine
from zerocast.metrics import NOT_MEASURED, Measurement, Meter

FINAL_WINDOW = 20  # training losses whose mean is the final loss; that of a single batch is noise


def learning_rate(config: TrainConfig, step: int) -> float:
    """Warm up linearly, then follow half a cosine down to `lr * min_lr_ratio`. A function of the
    step only, so a run can be resumed.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def train_step(
    model: GPT,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    *,
    lr: float,
    grad_clip: float,
    measured: Measurement = NOT_MEASURED,
) -> tuple[Tensor, Tensor]:
    """Make one optimizer step. Returns this rank's mean loss and the global gradient norm before
    clipping.
    """
    total = torch.zeros((), device=batches[0].tokens.device)
    for i, batch in enumerate(batches):
        is_last = i == len(batches) - 1
        with nullcontext() if is_last else optimizer.no_sync():
            with measured.phase("forward"):
                loss = model.loss(batch.tokens, batch.targets) / len(batches)
            with measured.phase("backward"):
                loss.backward()
        total += loss.detach()
    for group in optimizer.param_groups:
        group["lr"] = lr
    with measured.phase("norm"):
        norm = optimizer.clip_grad_norm_(grad_clip)
    with measured.phase("step"):
        optimizer.step()
        optimizer.zero_grad()
    return total, norm


@torch.no_grad()
def evaluate(model: GPT, corpus: Corpus, config: TrainConfig, world: World) -> float:
    """Mean loss over a fixed set of validation sequences, divided among the ranks."""
    # sum of losses, number of sequences
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    sequences, place = max(config.eval_sequences, world.size), world.share(config.slices)
    for batch in corpus.validation_batches(config.batch_size, sequences, rank=place.rank, ranks=place.size):
        loss = model.loss(batch.tokens.to(world.device), batch.targets.to(world.device))
        count = len(batch.tokens)
        total += torch.stack([loss.double() * count, torch.full_like(total[1], count)])
    loss_sum, count = world.sum(total).tolist()
    return float(loss_sum / count)


@dataclass
class Trainer:
    """A run: its configuration, model, data and progress."""

    config: TrainConfig
    world: World
    corpus: Corpus
    model: GPT
    optimizer: Optimizer
    log: RunLog
    step: int
    seconds: float = 0.0  # spent in training steps since the last record
    steps_timed: int = 0  # number of those steps
    losses: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    validation_loss: float = math.nan
    traffic: dict[str, float] = field(default_factory=dict)
    meter: Meter | None = None

    def __post_init__(self) -> None:
        self._batch(self.config.steps - 1, self.config.grad_accum - 1)  # ValueError now for too short a text
        self._make_meter()

    def run(self) -> Record:
        """Train to the last step. Returns the summary that also ends the log."""
        config, measured = self.config, min(self.step + 1, self.config.steps - 1)
        while self.step < config.steps:
            if self.step and self.step == config.steps - config.late_steps:
                self._switch()
            self._advance(measure=self.step == measured)
            if self.step % config.eval_every == 0 or self.step == config.steps:
                self._validate()
            if config.checkpoint_every and (self.step % config.checkpoint_every == 0 or self.step == config.steps):
                checkpoint.save(self.optimizer, self.model, config.out, self.step)
        return self._summarize()

    def _switch(self) -> None:
        """Continue in the late format, from the same masters."""
        switch(self.model, self.config, self.step)
        self._make_meter()

    def _make_meter(self) -> None:
        """Return a meter, if asked for; unquantized weights give times only, and nothing under
        FSDP2.
        """
        zero = isinstance(self.optimizer, Zero)
        self.meter = None
        if self.config.measure_every and (zero or self.config.format_at(self.step) != "bf16"):
            self.meter = Meter(self.optimizer if zero else self.model, self.config.measure_every)

    def _measured(self) -> AbstractContextManager[Measurement]:
        return self.meter.step() if self.meter else nullcontext(NOT_MEASURED)

    def _batches(self) -> list[Batch]:
        batches = [self._batch(self.step, micro_step) for micro_step in range(self.config.grad_accum)]
        return [batch.to(self.world.device) for batch in batches]

    def _batch(self, step: int, micro_step: int) -> Batch:
        config, place = self.config, self.world.share(self.config.slices)
        if config.batches == "once":
            index = (step * config.grad_accum + micro_step) * place.size + place.rank
            return self.corpus.batch_once(config.batch_size, seed=config.seed, index=index)
        at = {"seed": config.seed, "step": step, "micro_step": micro_step, "rank": place.rank}
        return self.corpus.train_batch(config.batch_size, **at)

    def _advance(self, measure: bool) -> None:
        """Make one step and time it; traffic is never counted on the first, which builds lazily."""
        config, counter, began = self.config, traffic_counter(self.model), time.perf_counter()
        lr = learning_rate(config, self.step)
        options = {"lr": lr, "grad_clip": config.grad_clip}
        with self._measured() as measured, counter if measure else nullcontext():
            loss, norm = train_step(self.model, self.optimizer, self._batches(), **options, measured=measured)
        if not config.keep_masters and isinstance(self.optimizer, Zero):
            forget_masters(self.optimizer)
        self.step += 1
        if measured.sample:
            self.log.write("measured", self.step, **measured.sample.scalars(), weights=measured.sample.by_weight())
        is_record = self.step % config.log_every == 0 or self.step == config.steps
        # waits for the device
        mean_loss = self.world.sum(loss).item() / self.world.size if is_record else math.nan
        self.seconds += time.perf_counter() - began
        self.steps_timed += 1
        if measure:
            count = count_parameters(self.model)
            self.traffic = {name: nbytes / count for name, nbytes in sorted(counter.nbytes.items())}
        if is_record:
            self._record(mean_loss, float(norm), lr)

    def _record(self, loss: float, norm: float, lr: float) -> None:
        config = self.config
        sequences = config.batch_size * config.grad_accum * self.world.share(config.slices).size
        tokens_a_step = sequences * config.model.context
        step_seconds = self.seconds / self.steps_timed
        speed = tokens_a_step / step_seconds
        self.seconds, self.steps_timed = 0.0, 0
        self.losses.append(loss)
        self.speeds.append(speed)
        self.log.write(
            "train", self.step, loss=loss, grad_norm=norm, lr=lr, step_seconds=step_seconds, tokens_per_s=speed
        )
        progress = f"step {self.step}/{config.steps}  loss {loss:.4f}"
        self.log.say(f"{progress}  norm {norm:.3f}  lr {lr:.2e}  {speed:,.0f} tokens/s")

    def _validate(self) -> None:
        self.validation_loss = evaluate(self.model, self.corpus, self.config, self.world)
        self.log.write("validation", self.step, loss=self.validation_loss)
        self.log.say(f"step {self.step}/{self.config.steps}  validation loss {self.validation_loss:.4f}")

    def _summarize(self) -> Record:
        if not self.losses:
            raise ValueError(f"nothing left to do: {self.config.out} is at step {self.step} of {self.config.steps}")
        summary: Record = {
            "train_loss": statistics.fmean(self.losses[-FINAL_WINDOW:]),
            "validation_loss": self.validation_loss,
            "weight_bytes_per_parameter": bytes_per_parameter(self.model),
            "weights_sha256": digest_of_weights(self.model),
            "traffic_bytes_per_parameter": self.traffic,
            "tokens_per_s": statistics.median(self.speeds),
            "skipped_steps": self.optimizer.skipped_steps,
            "products": products(self.model),
        }
        self.log.write("end", self.step, **summary)
        return summary


def switch(model: GPT, config: TrainConfig, step: int) -> None:
    """Let the matrices have the format of a step, if they are quantized in any."""
    if config.quantized != "bf16":
        zerocast.switch(model, recipe(config.format_at(step)))


def start(config: TrainConfig, world: World) -> tuple[int, GPT, Optimizer]:
    """Begin at step 0, or at the newest checkpoint."""
    model = build_model(config, world.device)
    optimizer = build_optimizer(model, config)
    step = 0
    if config.resume or config.elastic:
        try:
            step = checkpoint.load_newest(optimizer, model, config.out)
        except FileNotFoundError as error:  # raised on all ranks or on none
            if config.resume:
                raise SystemExit(f"--resume: {error}; without it a run begins at step 0") from None
    if config.format_at(step) != config.quantized:
        switch(model, config, step)
        if step:  # once more, for the delayed scales of this format
            checkpoint.load_newest(optimizer, model, config.out)
    return step, model, optimizer


def make_deterministic() -> None:
    """Ask torch for deterministic kernels; `ZeroConfig.deterministic` covers reductions."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(True)


class CannotBeginError(ValueError):
    """The options are invalid on this machine, or for this text or checkpoint."""


@contextmanager
def beginning() -> Iterator[None]:
    """Raise CannotBeginError for errors before the first step."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise CannotBeginError(str(error)) from error


def main(config: TrainConfig) -> Record:
    """Run one training from start or checkpoint to the last step. Returns its summary, on every
    rank; raises CannotBeginError.
    """
    if config.deterministic:
        make_deterministic()
    with beginning():
        world = World.join(config.device, config.timeout)
    try:
        with beginning():
            corpus = Corpus.load(config.data, config.model.context)
            step, model, optimizer = start(config, world)
            log = RunLog(config.out, resumed_at=step, enabled=world.rank == 0)
            trainer = Trainer(config, world, corpus, model, optimizer, log, step)
        facts = {"ranks": world.size, "device": str(world.device), "parameters": count_parameters(model)}
        where = {
            "machine": machine.describe(world.device),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        log.write("start", step, **facts, **where, text=corpus.fingerprint, config=dataclasses.asdict(config))
        log.say(f"{config.format}: {facts}, {len(corpus.train):,} bytes of text, from step {step} to {config.steps}")
        with zerocast.gemm.use(config.gemm, weight_gradients=config.weight_gradients):
            summary = trainer.run()
        log.close()
        return summary
    finally:
        world.leave()


def command(arguments: Sequence[str] | None = None) -> Record:
    """Run the training that a command line describes; options that cannot be met end the process
    with a line.
    """
    config = options(arguments)
    try:
        return main(config)
    except CannotBeginError as error:
        raise SystemExit(f"{PROGRAM}: {error}") from None


if __name__ == "__main__":
    interrupt.run(command)
