"""torch.optim.Muon over a prepared model: DTensors make its matrix products whole, and checkpoints go to ZeroMuon and back."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import zerocast
from tests.fsdp2.models import digests
from tests.selection import worlds
from tests.workers import on_ranks
from zerocast.fsdp2 import TrainingState
from zerocast.optim import load, save

LR, MOMENTUM, COEFFICIENTS = 1e-2, 0.95, (3.4445, -4.7750, 2.0315)
RECIPE = zerocast.Recipe({"*": "fp8_block"})


def net() -> nn.Sequential:
    """Two matrices, whose rows 2 and 3 ranks cut evenly and not, with biases for AdamW."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 71))


def split(model: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """(what Muon updates, what AdamW does) by name."""
    named = list(model.named_parameters())
    return [(n, p) for n, p in named if p.dim() == 2], [(n, p) for n, p in named if p.dim() != 2]


class Sharded:
    """The model under FSDP2 with torch's two optimizers."""

    def __init__(self) -> None:
        self.model = net()
        zerocast.fsdp2.prepare(self.model, RECIPE)
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer)
        hidden, rest = ([p for _, p in part] for part in split(self.model))
        self.muon, adam = torch.optim.Muon(hidden, lr=LR), torch.optim.AdamW(rest, lr=LR)
        self.optimizers: list[torch.optim.Optimizer] = [self.muon, adam]

    def backward(self, step: int) -> None:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        self.model(torch.randn(256, 64, generator=generator)).square().sum().backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def matrices(self) -> list[Tensor]:
        return [p.detach().full_tensor() for _, p in split(self.model)[0]]


class Whole:
    """The same model under ZeroMuon."""

    def __init__(self) -> None:
        self.model = net()
        zerocast.quantize_(self.model, RECIPE)
        hidden, rest = split(self.model)
        groups: list[dict[str, Any]] = [
            {"params": hidden, "use_muon": True},
            {"params": rest, "use_muon": False, "weight_decay": 0.01},
        ]
        self.optimizer = zerocast.ZeroMuon(groups, lr=LR)


def exact(gradient: Tensor, momentum_buffer: Tensor) -> Tensor:
    """The matrix that a first step with this gradient, after which momentum is this, goes by, in f64."""
    x = gradient.lerp(momentum_buffer, MOMENTUM).double()
    x = x / x.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@on_ranks(*worlds(2, slow=(3,)))
def test_torch_muon() -> None:
    """It orthogonalizes whole matrices: as near to f64 as in one process, where products in bf16 are added in another order."""
    run = Sharded()
    before = run.matrices()
    twins = [nn.Parameter(value.clone()) for value in before]
    oracle = torch.optim.Muon(twins, lr=LR, weight_decay=0.0)
    run.muon.param_groups[0]["weight_decay"] = 0.0
    run.backward(0)
    for twin, (_, parameter) in zip(twins, split(run.model)[0], strict=True):
        twin.grad = parameter.grad.full_tensor()
    with CommDebugMode() as mode:
        run.muon.step()
    oracle.step()
    found = []
    for twin, old, new in zip(twins, before, run.matrices(), strict=True):
        assert twin.grad is not None
        wanted = exact(twin.grad, oracle.state[twin]["momentum_buffer"])
        rate = LR * max(1, old.shape[0] / old.shape[1]) ** 0.5
        errors = [((old - value).double() / rate - wanted).norm() for value in (new, twin.detach())]
        found.append((errors[0], errors[1]))
    run.step()
    run.backward(1)
    zerocast.verify(run.model).raise_for_differences()
    assert all(sharded <= 1.5 * whole for sharded, whole in found), found
    # Two and more for each of five products of two matrices; ZeroMuon has none.
    assert mode.get_total_counts() >= 2 * 2 * 5


@on_ranks(2)
def test_checkpoints_go_to_zero_muon_and_back(tmp_path: Path) -> None:
    folder = str(tmp_path)
    first, whole, last = Sharded(), Whole(), Sharded()
    for step in range(2):
        first.backward(step)
        first.step()
    first.muon.param_groups[0]["momentum"] = 0.9
    state = TrainingState(first.model, first.optimizers)
    save(state, f"{folder}/fsdp2")
    load(whole.optimizer, f"{folder}/fsdp2")
    assert whole.optimizer.param_groups[0]["momentum"] == 0.9
    zerocast.verify(whole.optimizer).raise_for_differences()
    save(whole.optimizer, f"{folder}/zero")
    other = TrainingState(last.model, last.optimizers)
    load(other, f"{folder}/zero")
    held = {"model": state.state_dict()["model"], "optim": state.state_dict()["optim"]}
    assert digests(held).items() <= digests(other.state_dict()).items()
