"""What one rank alone refuses: every call with a collective raises on all ranks or on none, and none waits at a timeout."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocast
from tests.hosts.stopping import limit_collectives
from tests.optim.probe import Spec
from tests.optim.runs import ADAM, Run, Trainer
from tests.workers import error_of, on_ranks
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


class Trained(Trainer):
    """A run after a step, with an average."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Run(SPECS, options=(ADAM,)))
        self.folder, self.average = folder, EMA(self.optimizer, 0.9)
        self.checkpoints = zerocast.optim.Checkpoints(folder)
        self.step(0)
        self.state = self.optimizer.state_dict()
        self.sender = Sender(self.probe, "bf16")

    def swap(self) -> None:
        with self.average.swapped():
            pass

    def add(self) -> None:
        self.optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(16)))], **ADAM})

    def switch(self) -> None:
        zerocast.switch(self.optimizer, {"block": "nvfp4", "delayed": "fp8_current", "nv": "nvfp4", "*": "identity"})

    def export(self) -> None:
        zerocast.export.export_safetensors(self.probe, self.folder / "export", group=dist.group.WORLD)

    def load_masters(self) -> None:
        zerocast.optim.load_masters(self.optimizer, {spec.name: spec.initial().view(spec.shape) for spec in SPECS})


def write(run: Trained) -> None:
    with torch.no_grad():
        run.probe.get_parameter("norm").add_(1)


def write_codes(run: Trained) -> None:
    run.probe.get_parameter("block").rowwise_data.view(torch.uint8).add_(1)


def widen(run: Trained) -> None:
    parameter = run.probe.get_parameter("norm")
    parameter.data = parameter.data.double()


def set_learning_rate(run: Trained) -> None:
    run.optimizer.param_groups[0]["lr"] = "fast"


def list_another(run: Trained) -> None:
    run.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))


def outdate(run: Trained) -> None:
    """As a load does that raises on this rank."""
    with run.optimizer.overwriting():
        pass


STATES: dict[str, Callable[[Trained], None]] = {
    "a partial step": lambda run: run.optimizer._validity.broke_off("an optimizer step"),
    "a partial cast": lambda run: run.optimizer._validity.broke_off("a cast", masters=False),
    "a written parameter": write,
    "written codes": write_codes,
    "a parameter of another dtype": widen,
    "a learning rate that is none": set_learning_rate,
    "a parameter more in a group": list_another,
    "an outdated average": outdate,
}
CALLS: dict[str, Callable[[Trained], object]] = {
    "save": lambda run: zerocast.optim.save(run.optimizer, run.folder / "another"),
    "Checkpoints.save": lambda run: run.checkpoints.save(run.optimizer, 1),
    "Checkpoints.load": lambda run: run.checkpoints.load(run.optimizer),
    "load_state_dict": lambda run: run.optimizer.load_state_dict(run.state),
    "load_masters": Trained.load_masters,
    "full_state_dict": lambda run: zerocast.optim.full_state_dict(run.probe, run.optimizer),
    "switch": Trained.switch,
    "add_param_group": Trained.add,
    "swapped": Trained.swap,
    "export": Trained.export,
    "verify": lambda run: zerocast.verify(run.optimizer),
    "a meter": lambda run: CastMeter(run.optimizer).measure(),
    "a refit": lambda run: list(Sender(run.optimizer, "bf16", group=dist.group.WORLD).named_tensors()),
    "a refit of the model": lambda run: list(run.sender.named_tensors()),
    "another optimizer": lambda run: zerocast.ZeroAdamW(run.probe.param_groups((ADAM,))),
}


def told_alike(state: str, change: Callable[[], object], *calls: Callable[[], object]) -> None:
    """Once one rank is in this state, the calls raise on all ranks or on none, and none of them waits at a timeout."""
    limit_collectives(SECONDS)
    if dist.get_rank() == CULPRIT:
        change()
    started = time.monotonic()
    said = list(map(error_of, calls))
    seconds = time.monotonic() - started
    limit_collectives(30)
    assert seconds < SECONDS - 1, (state, said)
    raised = [False] * 2
    dist.all_gather_object(raised, any(said))
    assert raised[0] == raised[1], (state, said)


@pytest.mark.parametrize("call", CALLS)
@on_ranks(2)
def test_one_rank(call: str, tmp_path: Path) -> None:
    for number, (state, change) in enumerate(STATES.items()):
        run = Trained(tmp_path / str(number))
        if call == "Checkpoints.load":
            run.checkpoints.save(run.optimizer, 0)
        told_alike(state, partial(change, run), partial(CALLS[call], run))
