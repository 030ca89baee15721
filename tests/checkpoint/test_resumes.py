"""A resume is the run: every kind of small model, killed and resumed with a fresh initialisation, equals the run that goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.workers import on_ranks
from zerocast import QuantizedWeight, Recipe, ZeroAdamW, fsdp2, quantize_
from zerocast.checkpoint.untrained import own_buffers
from zerocast.fsdp2 import TrainingState
from zerocast.optim import Checkpoints

WIDTH = 32


class Tied(nn.Module):
    """An embedding that is also the last layer, and two layers with one quantized weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.outer.weight = self.inner.weight
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.outer(self.inner(x + self.embedding(torch.arange(len(x))))))


class Normed(nn.Module):
    """Statistics in persistent buffers, one of them int64, and a buffer that is made again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cached", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.second(self.norm(self.first(x)) * self.cached) * (1 + 0.01 * self.seen)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def built(kind: str, fmt: str, seed: int) -> nn.Module:
    """A model of bf16 parameters and quantized weights, some of them frozen."""
    torch.manual_seed(seed)
    model = {"tied": Tied, "buffers": Normed}.get(kind, plain)().bfloat16()
    if kind == "frozen plain":
        model[0].requires_grad_(False)
    if kind == "frozen quantized":
        # Of values like these mxfp8 has blocks that another cast would give another scale.
        nn.init.normal_(model[1].weight.requires_grad_(False))
    recipes = {"frozen plain": "[12].weight", "tied": "*er.weight", "buffers": "*t.weight"}
    quantize_(model, Recipe({recipes.get(kind, "*.weight"): fmt}))
    return model


def trained(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state(model: nn.Module) -> dict[str, Tensor]:
    """All that a forward pass reads: bytes of weights, plain parameters and buffers."""
    read: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        own = own_buffers(tensor) if isinstance(tensor, QuantizedWeight) else {"": tensor}
        read |= {f"{name}.{buffer}": value.detach().clone() for buffer, value in own.items()}
    return read


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not different


KINDS = ("plain", "frozen plain", "frozen quantized", "buffers", "tied")


@pytest.mark.parametrize("given", ["trained", "all"])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "fp8_delayed", "fp8_block"])
@pytest.mark.parametrize("kind", KINDS)
def test_own_loop(tmp_path: Path, kind: str, fmt: str, given: str) -> None:
    def optimizer_of(model: nn.Module) -> ZeroAdamW:
        return ZeroAdamW(
            [pair for pair in model.named_parameters() if given == "all" or pair[1].requires_grad], lr=1e-2
        )

    model = built(kind, fmt, seed=1)
    optimizer = optimizer_of(model)
    trained(model, optimizer, range(2))
    with Checkpoints(tmp_path, asynchronous=fmt == "nvfp4") as checkpoints:
        checkpoints.save(optimizer, 2, model=model)
        trained(model, optimizer, range(2, 4))
    again = built(kind, fmt, seed=2)
    resumed = optimizer_of(again)
    assert Checkpoints(tmp_path).load(resumed, model=again) == 2
    trained(again, resumed, range(2, 4))
    assert_equal(state(again), state(model))


@pytest.mark.parametrize(
    ("fmt", "other_fmt"), [("fp8_current", "fp8_current:element=e5m2"), ("nvfp4:exact_in_fp8=True", "nvfp4")]
)
def test_a_frozen_weight_of_another_format(tmp_path: Path, fmt: str, other_fmt: str) -> None:
    """Its bytes fit, and would be other values."""
    model = built("frozen quantized", fmt, seed=1)
    Checkpoints(tmp_path).save(ZeroAdamW(model.named_parameters()), 1, model=model)
    other = built("frozen quantized", other_fmt, seed=1)
    before = state(other)
    with pytest.raises(
        ValueError, match=f"1.weight is {fmt} of bfloat16 in the checkpoint, expected {other_fmt} of bfloat16"
    ):
        Checkpoints(tmp_path).load(ZeroAdamW(other.named_parameters()), model=other)
    assert_equal(state(other), before)


@on_ranks(2)
@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_delayed"])
@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2(tmp_path: Path, kind: str, fmt: str) -> None:
    """Masters and moments are FSDP2's, and so are frozen parameters; buffers are each rank's own."""

    def make(seed: int) -> tuple[Any, TrainingState, Any]:
        torch.manual_seed(seed)
        model = {"tied": Tied, "buffers": Normed}.get(kind, plain)()
        if kind.startswith("frozen"):
            model[1].requires_grad_(False)
        recipe = {"frozen plain": "[02].weight", "tied": "*er.weight", "buffers": "*t.weight"}.get(kind, "*.weight")
        fsdp2.prepare(model, Recipe({recipe: fmt}))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
        return model, TrainingState(model, optimizer), optimizer

    def train(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def read(model: Any) -> dict[str, Tensor]:
        return {name: getattr(one, "_local_tensor", one).detach().clone() for name, one in model.state_dict().items()}

    model, whole, optimizer = make(1)
    train(model, optimizer, range(2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(whole, 2)
    train(model, optimizer, range(2, 4))
    again, resumed, other = make(2)
    assert Checkpoints(tmp_path).load(resumed) == 2
    train(again, other, range(2, 4))
    assert_equal(read(again), read(model))
