"""Training runs of a probe as values, run on every rank beside the undistributed reference, or captured beside ordinary steps."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests import casts
from tests.formats import model
from tests.optim.probe import FEW, PLAIN, Probe, Spec
from tests.optim.undistributed import F32, Undistributed, UndistributedMuon, mean
from tests.workers import error_of
from zerocast import QuantizedWeight, ZeroAdamW, ZeroConfig, ZeroMuon
from zerocast.cast.captured_step import CapturedStep, Work
from zerocast.footprint.weight_bytes import PlannedConfig
from zerocast.formats import Columnwise
from zerocast.formats.element import dtype_name
from zerocast.fsdp2 import FusedAdamW
from zerocast.optim.device_step import CapturableZeroStep

ADAM: Mapping[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
DETERMINISTIC = ZeroConfig(bucket_size=4096, deterministic=True)
OVERLAP = dataclasses.replace(DETERMINISTIC, overlap_all_gather=True)
EIGHT_BIT_MOMENTS = dataclasses.replace(DETERMINISTIC, moment_dtype="8bit")
TWO_GROUPS = (ADAM, {**ADAM, "lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.0})


KINDS = ("ZeroAdamW", "ZeroMuon", "FusedAdamW")


def build(kind: str, named: Iterable[tuple[str, Tensor]], **options: Any) -> Any:
    """Build an optimizer of this class over named parameters. The matrices of a ZeroMuon are its last group,
    AdamW's the first.
    """
    named = list(named)
    if kind != "ZeroMuon":
        return {"ZeroAdamW": ZeroAdamW, "FusedAdamW": FusedAdamW}[kind](named, **options)
    groups = [
        {"params": [pair for pair in named if (pair[1].dim() == 2) is use_muon], "use_muon": use_muon}
        for use_muon in (False, True)
    ]
    return ZeroMuon([group for group in groups if group["params"]], **options)


def rank() -> int:
    """Return the rank of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """Return the number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


@dataclass(frozen=True)
class Run:
    """A model and the options of its training. With `accumulate` a step takes that many backward passes, all
    but the last under no_sync if `no_sync`.
    """

    specs: tuple[Spec, ...] = FEW
    steps: int = 3
    stage: int = 2
    config: ZeroConfig = DETERMINISTIC
    options: tuple[Mapping[str, Any], ...] = TWO_GROUPS
    max_norm: float | None = None
    schedule: bool = False
    accumulate: int = 1
    no_sync: bool = True
    assign: bool = False  # gradients are put on the parameters, there is no backward pass
    frozen: tuple[str, ...] = ()  # parameters that need no gradient
    device: str = "cpu"
    optimizer: type[ZeroAdamW] | type[ZeroMuon] = ZeroAdamW

    def factor(self, step: int) -> float:
        """Return the factor by which the schedule multiplies learning rates."""
        return 0.5 + 0.5 * math.cos(step / 5) if self.schedule else 1.0

    def options_at(self, step: int) -> list[dict[str, Any]]:
        return [{**options, "lr": options["lr"] * self.factor(step)} for options in self.options]

    def local(self, spec: Spec, passes: range, rank: int) -> Tensor | None:
        """Return the gradient that autograd leaves on one rank after these backward passes, in the dtype that
        is reduced.
        """
        widened = spec.fmt != PLAIN and self.config.grad_dtype is torch.float32
        total = None
        for gradient in (spec.gradient(p, rank) for p in passes):
            if gradient is not None:
                gradient = gradient.float() if widened else gradient
                total = gradient if total is None else total + gradient
        return None if total is None else total.to(self.config.grad_dtype or spec.dtype)

    def rounds(self, spec: Spec, step: int, ranks: int) -> list[F32]:
        """Return the mean over the ranks of what arrives, for each round."""
        passes = range(step * self.accumulate, (step + 1) * self.accumulate)
        parts = [passes] if self.no_sync or self.stage == 1 else [range(p, p + 1) for p in passes]
        return [mean([self.sent(spec, part, rank) for rank in range(ranks)], spec) for part in parts]

    def sent(self, spec: Spec, passes: range, rank: int) -> Tensor | None:
        """Return a rank's gradient as an owner decodes it. Groups of 128 begin where a parameter begins,
        however it is cut.
        """
        local = self.local(spec, passes, rank)
        if local is None or self.config.grad_wire is None:
            return local
        message = model.gradient_message(local.float().reshape(-1).numpy())
        return torch.from_numpy(model.gradient_mean([message], local.numel(), 1)).view(local.shape)


class Trainer:
    """One rank's probe and optimizer of a run."""

    def __init__(self, run: Run, group: Any = None) -> None:
        self.run, self.probe = run, Probe(run.specs).to(run.device)
        for name in run.frozen:
            self.probe.get_parameter(name).requires_grad_(False)
        self.rank = rank()
        groups = self.probe.param_groups(run.options)
        self.optimizer = run.optimizer(groups, group=group, stage=run.stage, config=run.config)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, run.factor) if run.schedule else None

    def backward(self, step: int) -> None:
        """Run the backward passes of a step."""
        count = self.run.accumulate
        for index, number in enumerate(range(step * count, (step + 1) * count)):
            if self.run.assign:
                self._assign(number)
            elif self.run.no_sync and index + 1 < count:
                with self.optimizer.no_sync():
                    self.probe.backward(number, self.rank)
            else:
                self.probe.backward(number, self.rank)

    def _assign(self, number: int) -> None:
        for spec in self.run.specs:
            gradient = spec.gradient(number, self.rank)
            parameter = self.probe.get_parameter(spec.name)
            if gradient is not None and parameter.grad_dtype is not None:
                gradient = gradient.to(parameter.grad_dtype)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def step(self, step: int) -> None:
        self.backward(step)
        if self.run.max_norm is not None:
            self.optimizer.clip_grad_norm_(self.run.max_norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()

    def train(self, steps: Iterable[int]) -> None:
        """Take the steps with these numbers."""
        for step in steps:
            self.step(step)


def boxes(value: Tensor) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Yield each part of a state tensor on this rank, as (where, values), by the protocol that checkpoints use."""
    if not hasattr(value, "__create_chunk_list__"):
        yield (..., value)
        return
    for chunk in value.__create_chunk_list__():
        where = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        yield where, value.__get_tensor_shard__(MetadataIndex("", chunk.offsets))


def weight_bytes(probe: torch.nn.Module) -> dict[str, casts.Bytes]:
    """Return the bytes of all weights by name."""
    found = {}
    for name, parameter in probe.named_parameters():
        quantized = isinstance(parameter, QuantizedWeight)
        found[name] = casts.bytes_of(parameter) if quantized else {"rowwise_data": casts.raw(parameter).copy()}
    return found


def snapshot(trainer: Trainer) -> dict[str, Any]:
    """Return all that a rank holds."""
    found: dict[str, Any] = {f"{n} {b}": v for n, held in weight_bytes(trainer.probe).items() for b, v in held.items()}
    state = trainer.optimizer.state_dict()
    leaves = {f"model {n}": v for n, v in state["model"].items()}
    leaves |= {f"{k} {n}": v for n, held in state["optim"]["state"].items() for k, v in held.items()}
    leaves |= {f"{k} {n}": v for n, held in state["optim"]["param_groups"].items() for k, v in held.items()}
    leaves |= {f"{k} {n}": v for n, held in state["zerocast"].items() for k, v in held.items()}
    for name, value in leaves.items():
        found |= {f"{name} {where}": casts.raw(part).copy() for where, part in boxes(value)}
    return found


def refused(trainer: Trainer, call: Callable[[], object]) -> str:
    """Return the error of a call that changes nothing of what this rank holds."""
    before = snapshot(trainer)
    said = error_of(call)
    casts.assert_same_bytes(snapshot(trainer), before, f"rank {trainer.rank}: {said}")
    return said


def assert_equals(trainer: Trainer, reference: Undistributed, what: str) -> None:
    """Assert that masters, moments, step and bytes are the reference's, to the bit."""
    state = trainer.optimizer.state_dict()
    for name in reference.specs:
        held = {"master": (state["model"][name], reference.master[name])}
        moments, expected = state["optim"]["state"][name], reference.state(name)
        assert moments.keys() - {"step"} == expected.keys(), what
        held |= {field: (moments[field], values) for field, values in expected.items()}
        assert float(moments.get("step", reference.steps_of(name))) == reference.steps_of(name), what
        for field, (found, wanted) in held.items():
            for where, values in boxes(found):
                label = f"{what}: {field} of {name} at {where}"
                casts.assert_same_bytes({"f32": casts.raw(values.float())}, {"f32": _raw(wanted[where])}, label)
    found_bytes = weight_bytes(trainer.probe)
    for name, wanted_bytes in reference.bytes.items():
        casts.assert_same_bytes(found_bytes[name], wanted_bytes, f"{what}: {name}")
    assert trainer.optimizer.skipped_steps == reference.skipped, what


def _raw(values: F32) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


class Compared(Trainer):
    """One rank's part of a run, beside the undistributed reference."""

    def __init__(self, run: Run = Run(), group: Any = None) -> None:
        super().__init__(run, group)
        specs, moment_dtype = [spec for spec in run.specs if spec.name not in run.frozen], run.config.moment_dtype
        self.reference = (
            Undistributed(specs, moment_dtype)
            if run.optimizer is ZeroAdamW
            else UndistributedMuon(specs, moment_dtype, run.device)
        )
        self.options_of_added: list[Mapping[str, Any]] = []

    def follow(self, step: int, ranks: int | None = None) -> None:
        """Take the reference's step, with the gradients of that many ranks, by default of all."""
        gradients = {name: self.run.rounds(spec, step, ranks or world()) for name, spec in self.reference.specs.items()}
        options = [*self.run.options_at(step), *self.options_of_added]
        self.reference.step(gradients, options, self.run.max_norm)

    def check(self, what: str) -> None:
        """Check that the run and its reference hold the same state."""
        assert_equals(self, self.reference, f"rank {self.rank}, {what}")

    def go_on(self, *steps: int) -> None:
        """Take steps of both, and compare after each."""
        for step in steps:
            self.step(step)
            self.follow(step)
            self.check(f"step {step}")


def check(run: Run) -> None:
    """Train and compare after every step, of which none is skipped."""
    compared = Compared(run)
    compared.check("before the first step")
    compared.go_on(*range(run.steps))
    assert compared.reference.skipped == 0


SKIPPED_STEP, ORDINARY_STEP = 3, 5  # a step with a gradient that is not finite; one that both take with step()
LOADED_BEFORE = 7  # before this step a state is loaded


@dataclass(frozen=True)
class CapturedCase(Run):
    """A training run whose gradients are put on parameters. Without `max_norm` the captured step clips nothing."""

    assign: bool = True
    max_norm: float | None = 0.5
    tensor_lr: bool = False
    steps: int = 9


class Repeated(CapturedStep):
    """A captured step with repeated work in place of a CUDA graph where there is none. Recording launches
    nothing there either.
    """

    @staticmethod
    def _record(work: Work) -> Work:
        return work


@contextlib.contextmanager
def repeated() -> Iterator[None]:
    """While the context is open, `optimizer.capture` makes such steps on a CPU."""
    with (
        mock.patch("zerocast.optim.zero_optimizer.CapturedStep", Repeated),
        mock.patch("zerocast.optim.zero_optimizer.check_capturable"),
    ):
        yield


class Trainee(Trainer):
    """A run that may take captured steps."""

    def __init__(self, case: CapturedCase, group: Any = None) -> None:
        super().__init__(case, group)
        for options in self.optimizer.param_groups if case.tensor_lr else ():
            options["lr"] = torch.tensor(options["lr"], device=case.device)

    def capture(self, kind: type[CapturedStep] = Repeated) -> CapturedStep:
        """Return the step as a graph, or on the CPU as something that acts like one."""
        o, limit = self.optimizer, self.run.max_norm
        if self.run.device != "cpu":
            return o.capture(limit)
        return kind(CapturableZeroStep(o._parts, o._prepare, o._finish, limit))

    def backward(self, step: int) -> None:
        """Make new gradients, with an infinite one on rank 0 in the step to be skipped."""
        super().backward(step)
        if step == SKIPPED_STEP and self.rank == 0:
            self.probe.get_parameter("nv").grad[0, 0] = torch.inf

    def change_rates(self, step: int) -> None:
        """Change learning rates, numbers and tensors alike, as a scheduler does."""
        for group in self.optimizer.param_groups:
            if step % 2:
                group["lr"] *= 0.7

    def ordinary_step(self) -> Tensor:
        limit = self.run.max_norm
        norm = self.optimizer.clip_grad_norm_(1e30 if limit is None else limit)
        self.optimizer.step()
        return norm

    def held(self) -> casts.Bytes:
        """Return everything that a step changes, columnwise copies too, which must be of the last cast where
        they are kept.
        """
        quantized = [p for p in self.probe.parameters() if isinstance(p, QuantizedWeight)]
        kept = [p for p in quantized if self.run.config.keep_columnwise and p.format.columnwise is not Columnwise.NONE]
        assert all(p.state.columnwise_is_fresh() for p in kept)
        return snapshot(self) | {"skipped": np.array([self.optimizer.skipped_steps], np.uint8)}


def compare_with_captured(case: CapturedCase, group: Any = None) -> int:
    """Train both, and compare all that they hold after each step; returns the steps that were skipped."""
    eager, replaying = Trainee(case, group), Trainee(case, group)
    before = replaying.held()
    captured = replaying.capture()
    casts.assert_same_bytes(replaying.held(), before, "capturing changed something")
    for step in range(case.steps):
        for trainee in (eager, replaying):
            if step == LOADED_BEFORE:
                trainee.optimizer.load_state_dict(trainee.optimizer.state_dict())
            trainee.backward(step)
            trainee.change_rates(step)
        norms = eager.ordinary_step(), replaying.ordinary_step() if step == ORDINARY_STEP else captured()
        assert torch.equal(*norms) or step == SKIPPED_STEP, (step, norms)
        casts.assert_same_bytes(replaying.held(), eager.held(), f"rank {eager.rank}, step {step}, {case}")
    assert int(replaying.optimizer.state_dict()["optim"]["state"]["nv"]["step"]) == case.steps - 1
    return replaying.optimizer.skipped_steps


def planned_config(config: ZeroConfig) -> PlannedConfig:
    """Return what `zerocast plan` reads of the configuration of a run."""
    return PlannedConfig(
        bucket_size=config.bucket_size,
        deterministic=config.deterministic,
        grad_wire=config.grad_wire,
        grad_dtype=None if config.grad_dtype is None else dtype_name(config.grad_dtype),
        moment_dtype=dtype_name(config.moment_dtype),
        keep_columnwise=config.keep_columnwise,
    )
