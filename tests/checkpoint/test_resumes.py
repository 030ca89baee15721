"""A resume is the run: every kind of small model, killed and resumed with a fresh initialisation, equals the run that goes on."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.fsdp2.models import slow
from tests.optim.runs import rank
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


RECIPES = {"frozen plain": "[02].weight", "tied": "*er.weight", "buffers": "*t.weight"}
FORMATS = ("nvfp4", "mxfp8", "fp8_delayed", "fp8_block")
KINDS = ("plain", "frozen plain", "frozen quantized", "buffers", "tied")


def model_of(kind: str, seed: int) -> nn.Module:
    """A model of which some parameters may be frozen."""
    torch.manual_seed(seed)
    model = {"tied": Tied, "buffers": Normed}.get(kind, plain)()
    if kind.startswith("frozen"):
        # Of values like these mxfp8 has blocks that another cast would give another scale.
        nn.init.normal_(model[1].weight)
        model[1].requires_grad_(False)
    return model


class OwnLoop:
    """A model of bf16 parameters and quantized weights under ZeroAdamW, which is given all of them or those that are trained."""

    def __init__(self, kind: str, fmt: str, seed: int, given: str = "all") -> None:
        self.model = quantize_(model_of(kind, seed).bfloat16(), Recipe({RECIPES.get(kind, "*.weight"): fmt}))
        named = [pair for pair in self.model.named_parameters() if given == "all" or pair[1].requires_grad]
        self.optimizer = self.saved = ZeroAdamW(named, lr=1e-2)
        self.passed = {"model": self.model}

    def state(self) -> dict[str, Tensor]:
        """All that a forward pass reads: bytes of weights, plain parameters and buffers."""
        read: dict[str, Tensor] = {}
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            own = own_buffers(tensor) if isinstance(tensor, QuantizedWeight) else {"": tensor}
            read |= {f"{name}.{buffer}": value.detach().clone() for buffer, value in own.items()}
        return read


class UnderFSDP2:
    """Masters and moments are FSDP2's, and so are frozen parameters; buffers are each rank's own."""

    def __init__(self, kind: str, fmt: str, seed: int) -> None:
        self.model = fsdp2.prepare(model_of(kind, seed), Recipe({RECIPES.get(kind, "*.weight"): fmt}))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW([one for one in self.model.parameters() if one.requires_grad], lr=1e-2)
        self.saved, self.passed = TrainingState(self.model, self.optimizer), {}

    def state(self) -> dict[str, Tensor]:
        held = self.model.state_dict()
        return {name: getattr(one, "_local_tensor", one).detach().clone() for name, one in held.items()}


def train(run: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank())
        x = torch.randn(8, WIDTH, generator=generator).to(next(run.model.parameters()).dtype)
        run.model(x).float().square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not different


def check(make: Callable[[int], Any], folder: Path, asynchronous: bool = False) -> None:
    run = make(1)
    train(run, range(2))
    with Checkpoints(folder, asynchronous=asynchronous) as checkpoints:
        checkpoints.save(run.saved, 2, **run.passed)
        train(run, range(2, 4))
    again = make(2)
    assert Checkpoints(folder).load(again.saved, **again.passed) == 2
    train(again, range(2, 4))
    assert_equal(again.state(), run.state())


def cells() -> Iterator[Any]:
    """Yield every kind with every format, alternately given all parameters and those that are trained; the others are slow."""
    for (row, kind), (column, fmt) in itertools.product(enumerate(KINDS), enumerate(FORMATS)):
        quick, other = ("trained", "all") if (row + column) % 2 else ("all", "trained")
        yield kind, fmt, quick
        yield slow(kind, fmt, other)


@pytest.mark.parametrize(("kind", "fmt", "given"), cells())
def test_own_loop(tmp_path: Path, kind: str, fmt: str, given: str) -> None:
    check(lambda seed: OwnLoop(kind, fmt, seed, given), tmp_path, asynchronous=fmt == "nvfp4")


@on_ranks(2)
@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_delayed"])
@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2(tmp_path: Path, kind: str, fmt: str) -> None:
    check(lambda seed: UnderFSDP2(kind, fmt, seed), tmp_path)


@pytest.mark.parametrize(
    ("fmt", "other_fmt"), [("fp8_current", "fp8_current:element=e5m2"), ("nvfp4:exact_in_fp8=True", "nvfp4")]
)
def test_a_frozen_weight_of_another_format(tmp_path: Path, fmt: str, other_fmt: str) -> None:
    """Its bytes fit, and would be other values."""
    run, other = OwnLoop("frozen quantized", fmt, seed=1), OwnLoop("frozen quantized", other_fmt, seed=1)
    Checkpoints(tmp_path).save(run.saved, 1, model=run.model)
    before = other.state()
    with pytest.raises(
        ValueError, match=f"1.weight is {fmt} of bfloat16 in the checkpoint, expected {other_fmt} of bfloat16"
    ):
        Checkpoints(tmp_path).load(other.saved, model=other.model)
    assert_equal(other.state(), before)
