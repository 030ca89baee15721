"""A refusal or a call of one rank alone makes all ranks raise or none, and none waits for a timeout."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import slow
from tests.hosts.stopping import limit_collectives
from tests.observed import debug_mode
from tests.optim.probe import Spec
from tests.optim.runs import ADAM, Compared, Run, Trainer
from tests.workers import error_of, on_ranks
from zerocast.fsdp2 import FusedAdamW, TrainingState
from zerocast.fsdp2.prepare import managers_of, validity_of
from zerocast.metrics import CastMeter
from zerocast.optim import EMA
from zerocast.serve import Sender

CULPRIT, SECONDS = 1, 5.0
SPECS = (
    Spec("block", (64, 128), "fp8_block"),
    Spec("delayed", (32, 32), "fp8_delayed:amax_history_len=3"),
    Spec("nv", (48, 32), "nvfp4"),
    Spec("norm", (64,)),
)
FORMATS = ("nvfp4", "fp8_delayed:amax_compute_algo=most_recent,amax_history_len=3")


class Zero(Trainer):
    """A run of ZeroAdamW after a step, with an average."""

    def __init__(self, folder: Path) -> None:
        self.recipe = {"block": "nvfp4", "delayed": "fp8_current", "nv": "nvfp4", "*": "identity"}
        super().__init__(Run(SPECS, options=(ADAM,)))
        self.folder, self.average, self.model = folder, EMA(self.optimizer, 0.9), self.probe
        self.switched = self.saved = self.optimizer
        self.step(0)
        self.state = self.optimizer.state_dict()
        self.sender = Sender(self.probe, "bf16")

    def swap(self) -> None:
        with self.average.swapped():
            pass

    def load_masters(self) -> None:
        zerocast.optim.load_masters(self.optimizer, {spec.name: spec.initial().view(spec.shape) for spec in SPECS})

    def gather(self) -> None:
        """Do nothing: the step has gathered."""


class Sharded:
    """A model under FSDP2 after a step."""

    def __init__(self, folder: Path, optimizer: type[torch.optim.Optimizer] = FusedAdamW) -> None:
        self.folder, self.recipe = folder, {"*": "fp8_current"}
        self.model = models.sharded(models.Net(FORMATS, 64, 96))
        self.optimizer = optimizer(self.model.named_parameters(), lr=1e-2)  # type: ignore[call-arg]
        self.switched, self.saved = self.model, TrainingState(self.model, self.optimizer)
        self.step()

    def step(self) -> None:
        models.train(self.model, self.optimizer, range(1), 64)

    def load_masters(self) -> None:
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        zerocast.fsdp2.load_masters(self.model, {name: torch.ones(tensor.shape) for name, tensor in named})

    def gather(self) -> None:
        with torch.no_grad():
            self.model(models.batch(0, 64))


def write(name: str, run: Any) -> None:
    with torch.no_grad():
        run.model.get_parameter(name).add_(1)


def write_codes(run: Zero) -> None:
    run.probe.get_parameter("block").rowwise_data.view(torch.uint8).add_(1)


def widen(run: Zero) -> None:
    parameter = run.probe.get_parameter("norm")
    parameter.data = parameter.data.double()


def set_learning_rate(rate: Any, run: Any) -> None:
    run.optimizer.param_groups[0]["lr"] = rate


def list_another(run: Zero) -> None:
    run.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))


def outdate(run: Zero) -> None:
    """Begin to overwrite the state on this rank, like a load that raises."""
    with run.optimizer.overwriting():
        pass


def checkpoints(run: Any) -> zerocast.optim.Checkpoints:
    return zerocast.optim.Checkpoints(run.folder)


States = dict[str, Callable[[Any], object]]
STATES: dict[Any, States] = {
    Zero: {
        "a partial step": lambda run: run.optimizer._validity.failed_partway("an optimizer step"),
        "a partial cast": lambda run: run.optimizer._validity.failed_partway("a cast", masters=False),
        "a written parameter": partial(write, "norm"),
        "written codes": write_codes,
        "a parameter of another dtype": widen,
        "a learning rate that is none": partial(set_learning_rate, "fast"),
        "a parameter more in a group": list_another,
        "an outdated average": outdate,
    },
    Sharded: {
        "a partial optimizer": lambda run: validity_of(run.optimizer).failed_partway("an optimizer step"),
        "a partial cast": lambda run: managers_of(run.model)[0].plan.validity.failed_partway("a cast", masters=False),
        "a partial model": lambda run: validity_of(run.model).failed_partway("a load"),
        "a written master": partial(write, "blocks.0.1.weight"),
        "a negative learning rate": partial(set_learning_rate, -1.0),
    },
}
CALLS: States = {
    "Checkpoints.save": lambda run: checkpoints(run).save(run.saved, 1),
    "Checkpoints.load": lambda run: checkpoints(run).load(run.saved),
    "load_masters": lambda run: run.load_masters(),
    "switch": lambda run: zerocast.switch(run.switched, run.recipe),
    "export": lambda run: zerocast.export.export_safetensors(run.model, run.folder / "export", group=dist.group.WORLD),
    "verify": lambda run: zerocast.verify(run.switched),
}
OF_ZERO: States = {
    "save": lambda run: zerocast.optim.save(run.optimizer, run.folder / "another"),
    "load_state_dict": lambda run: run.optimizer.load_state_dict(run.state),
    "full_state_dict": lambda run: zerocast.optim.full_state_dict(run.probe, run.optimizer),
    "add_param_group": lambda run: run.optimizer.add_param_group(
        {"params": [("more", nn.Parameter(torch.ones(16)))], **ADAM}
    ),
    "swapped": Zero.swap,
    "a meter": lambda run: CastMeter(run.optimizer).measure(),
    "a refit": lambda run: list(Sender(run.optimizer, "bf16", group=dist.group.WORLD).named_tensors()),
    "a refit of the model": lambda run: list(run.sender.named_tensors()),
    "another optimizer": lambda run: zerocast.ZeroAdamW(run.probe.param_groups((ADAM,))),
}
PAIRS = [
    *((Zero, call) for call in CALLS | OF_ZERO),
    *((Sharded, call) for call in (*CALLS, "step")),
    (partial(Sharded, optimizer=torch.optim.AdamW), "step"),  # which steps with a negative learning rate
]
# Every call is made in every fourth state, from one of the first four on by turns. The rest is slow.
CASES: list[Any] = []
for number, pair in enumerate(PAIRS):
    CASES += [(*pair, first) if first == number % 4 else slow(*pair, first) for first in range(4)]


@pytest.mark.parametrize(
    ("make", "call", "first"), CASES, ids=lambda value: getattr(value, "__name__", str(value)[:10])
)
@on_ranks(2)
def test_one_rank(make: Any, call: str, first: int, tmp_path: Path) -> None:
    """A call on a rank in such a state raises on all ranks or none, or the next gather does."""
    for number, (state, change) in list(enumerate(STATES[getattr(make, "func", make)].items()))[first::4]:
        run = make(tmp_path / str(number))
        if call == "Checkpoints.load":
            checkpoints(run).save(run.saved, 0)
        limit_collectives(SECONDS)
        if dist.get_rank() == CULPRIT:
            change(run)
        started = time.monotonic()
        calls = partial((CALLS | OF_ZERO | {"step": Sharded.step})[call], run), run.gather
        said = list(map(error_of, calls))
        seconds = time.monotonic() - started
        limit_collectives(30)
        assert seconds < SECONDS - 1, (state, said)
        raised = [False] * 2
        dist.all_gather_object(raised, any(said))
        assert raised[0] == raised[1], (state, said)


# -- ranks whose programs differ: all of them raise, none hangs, and afterwards they can go on together

RUN = Run()
Call = Callable[[Trainer], object]


def step(trainer: Trainer, passes: int = 1, max_norm: float | None = None, factor: float = 1.0) -> None:
    """Step after `passes` backward passes, clipped if `max_norm` is given, with the learning rate times `factor`."""
    for _ in range(passes):
        trainer.backward(1)
    if max_norm is not None:
        trainer.optimizer.clip_grad_norm_(max_norm)
    trainer.optimizer.param_groups[0]["lr"] *= factor
    trainer.optimizer.step()


QUICK = "steps with, reduces the gradients"
IN_DEBUG_MODE: dict[str, tuple[Call, Call]] = {
    "reduces the gradients, verifies": (step, lambda trainer: zerocast.verify(trainer.optimizer)),
    QUICK: (step, lambda trainer: step(trainer, passes=2)),
    "steps with, clips gradients to 0.1": (step, lambda trainer: step(trainer, max_norm=0.1)),
    "'lr': 0.01, 'lr': 0.005": (step, lambda trainer: step(trainer, factor=0.5)),
    "reduces the gradients, switches to a different recipe": (
        step,
        lambda trainer: zerocast.switch(trainer.optimizer, zerocast.Recipe({})),
    ),
}


@pytest.mark.parametrize("case", [case if case == QUICK else slow(case) for case in IN_DEBUG_MODE])
@on_ranks(2)
@debug_mode()
def test_steps_in_debug_mode(case: str) -> None:
    """Ranks that make different calls raise at once in debug mode. The next common step has the bits of a first step."""
    trainer, start = Compared(RUN), time.monotonic()
    said = error_of(lambda: IN_DEBUG_MODE[case][dist.get_rank()](trainer))
    assert time.monotonic() - start < 10.0
    assert said.startswith("RuntimeError: ranks make different calls: rank 0 "), said
    for expected, of_rank in zip(case.split(", ", 1), said.split(", rank 1 "), strict=True):
        assert expected in of_rank, said
    for group, options in zip(trainer.optimizer.param_groups, RUN.options, strict=True):
        group["lr"] = options["lr"]
    trainer.optimizer.zero_grad()
    trainer.go_on(0)


@on_ranks(2)
@debug_mode()
def test_equal_programs_in_debug_mode() -> None:
    """Accumulation, passes without any gradient on a rank and skipped steps call no different rolls."""
    for run in (RUN, Run(accumulate=2, max_norm=0.5), Run(stage=1, accumulate=2, no_sync=False)):
        Compared(run).go_on(0, 1)
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = zerocast.ZeroAdamW([("w", weight)])
    if dist.get_rank() == 0:
        weight.sum().backward()
    optimizer.step()
