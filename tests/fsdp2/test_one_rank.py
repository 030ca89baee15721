"""What one rank alone refuses: all ranks raise, in the call or at the next gather, or none; no rank waits at a timeout."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import Net
from tests.optim.test_one_rank import told_alike
from tests.workers import on_ranks
from zerocast.fsdp2 import FusedAdamW, TrainingState
from zerocast.fsdp2.prepare import managers_of, validity_of
from zerocast.optim import Checkpoints

FORMATS = ("nvfp4", "fp8_delayed:amax_compute_algo=most_recent,amax_history_len=3", "mxfp8")


class Trained:
    """A model after a step."""

    def __init__(self, folder: Path, optimizer: type[torch.optim.Optimizer]) -> None:
        self.folder, self.model = folder, models.sharded(Net(FORMATS, 64, 96))
        self.optimizer = optimizer(self.model.named_parameters(), lr=1e-2)  # type: ignore[call-arg]
        self.state, self.checkpoints = TrainingState(self.model, self.optimizer), Checkpoints(folder)
        self.step()

    def step(self) -> None:
        self.model(models.batch(0, 64)).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gather(self) -> None:
        with torch.no_grad():
            self.model(models.batch(0, 64))

    def load_masters(self) -> None:
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        zerocast.fsdp2.load_masters(self.model, {name: torch.ones(tensor.shape) for name, tensor in named})


def write(run: Trained) -> None:
    with torch.no_grad():
        run.model.get_parameter("blocks.0.1.weight").add_(1)


def set_learning_rate(run: Trained) -> None:
    run.optimizer.param_groups[0]["lr"] = -1.0


STATES: dict[str, Callable[[Trained], None]] = {
    "a partial optimizer": lambda run: validity_of(run.optimizer).broke_off("an optimizer step"),
    "a partial cast": lambda run: managers_of(run.model)[0].plan.validity.broke_off("a cast", masters=False),
    "a partial model": lambda run: validity_of(run.model).broke_off("a load"),
    "a written master": write,
    "a negative learning rate": set_learning_rate,
}
CALLS: dict[str, Callable[[Trained], object]] = {
    "step": Trained.step,
    "save": lambda run: run.checkpoints.save(run.state, 1),
    "load": lambda run: run.checkpoints.load(run.state),
    "load_masters": Trained.load_masters,
    "switch": lambda run: zerocast.switch(run.model, {"*": "fp8_current"}),
    "verify": lambda run: zerocast.verify(run.model),
    "export": lambda run: zerocast.export.export_safetensors(run.model, run.folder / "export"),
}


@pytest.mark.parametrize("call", CALLS)
@on_ranks(2)
def test_one_rank(call: str, tmp_path: Path) -> None:
    check(call, tmp_path, FusedAdamW)


@on_ranks(2)
def test_one_rank_with_torchs_adamw(tmp_path: Path) -> None:
    """Which steps with a negative learning rate."""
    check("step", tmp_path, torch.optim.AdamW)


def check(call: str, folder: Path, optimizer: type[torch.optim.Optimizer]) -> None:
    for number, (state, change) in enumerate(STATES.items()):
        run = Trained(folder / str(number), optimizer)
        if call == "load":
            run.checkpoints.save(run.state, 0)
        told_alike(state, partial(change, run), partial(CALLS[call], run), run.gather)
