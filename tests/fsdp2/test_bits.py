"""Gathered weights are the unsharded cast of the whole masters, bit for bit, before and after optimizer steps."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from tests.fsdp2 import models
from tests.fsdp2.models import FEW, FORMATS, SMALL, Net, slow
from tests.workers import Ranks

PLACES = [
    (1, 96),
    (2, 160),
    (3, 96),
    (4, 32),
]  # ranks and rows: boundaries on blocks and in them, empty shards of scales
MORE_PLACES = [(world, hidden) for hidden in (32, 96, 160) for world in (1, 2, 3, 4) if (world, hidden) not in PLACES]


SOME = (*FEW, "mxfp8")  # one of each rule for scales; every format is in the first test


def trained(formats: tuple[str, ...], width: int, hidden: int, options: dict[str, Any], steps: int = 2) -> list[str]:
    """Complaints about the bytes at the start and after each step."""
    model = models.sharded(Net(formats, width, hidden), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = models.complaints(model, f"{width}x{hidden} at the start")
    for step in range(steps):
        models.train(model, optimizer, range(step, step + 1), width)
        found += models.complaints(model, f"{width}x{hidden} after step {step}")
    return found


def check(ranks: Ranks, world: int, *case: Any) -> None:
    """No rank complains."""
    assert ranks(world)(trained, *case) == [[]] * world


@pytest.mark.shows(host="FSDP2", parallel="data", formats=FORMATS)
@pytest.mark.parametrize(("world", "hidden"), [*PLACES, *(slow(*place) for place in MORE_PLACES)])
def test_every_format(ranks: Ranks, world: int, hidden: int) -> None:
    check(ranks, world, FORMATS, 64, hidden, {})


@pytest.mark.parametrize(("world", "hidden"), [(4, 1), (2, 129), slow(2, 1), slow(4, 129)])
def test_fewer_rows_than_ranks_and_odd_rows(ranks: Ranks, world: int, hidden: int) -> None:
    check(ranks, world, SMALL, 130, hidden, {})


@pytest.mark.parametrize("world", [2, 3])
@given(data=st.data())
@settings(max_examples=5)
def test_any_shape(ranks: Ranks, world: int, data: st.DataObject) -> None:
    fmt = data.draw(st.sampled_from(FORMATS))
    unit = 32 if fmt not in SMALL else 1
    width, hidden = (unit * data.draw(st.integers(1, 320 // unit)) for _ in range(2))
    check(ranks, world, (fmt,), width, hidden, {}, 1)


@pytest.mark.parametrize(
    ("dtype", "reshard"), [(None, False), (torch.float16, True), slow(None, True), slow(torch.float16, False)]
)
def test_reshard_and_dtype(ranks: Ranks, reshard: bool, dtype: torch.dtype | None) -> None:
    options = {"reshard_after_forward": reshard, "mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
    check(ranks, 2, SOME, 64, 96, options)


def test_cpu_offload(ranks: Ranks) -> None:
    check(ranks, 2, SOME, 64, 96, {"offload_policy": CPUOffloadPolicy(pin_memory=False)})


def on_mesh(shape: tuple[int, int]) -> list[str]:
    """Hybrid sharding: replicas by shards."""
    return trained(SOME, 64, 96, {"mesh": models.mesh(shape, ("replicate", "shard"))})


@pytest.mark.shows(
    host="FSDP2",
    parallel=lambda shape: "replicas" if shape[1] == 1 else "data, replicas",
    formats=SOME,
    ranks=lambda shape: shape[0] * shape[1],
)
@pytest.mark.parametrize("shape", [(2, 1), (2, 2), slow((4, 1))])
def test_replicas(ranks: Ranks, shape: tuple[int, int]) -> None:
    world = shape[0] * shape[1]
    assert ranks(world)(on_mesh, shape) == [[]] * world


class Checkpointed(Net):
    """With activation checkpointing of every block."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual, recomputed."""
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def gradients(make: type[nn.Module], reshard: bool, micro_batches: int) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Complaints after accumulating, and the gradient shards."""
    model = models.sharded(make(SOME, 64, 96), reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(2):
        for index in range(micro_batches):
            model.set_requires_gradient_sync(index == micro_batches - 1)
            x = models.batch(10 * step + index, 64).requires_grad_()
            model(x).float().square().mean().backward()
        grads = {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return models.complaints(model, "accumulated"), grads


def test_recomputed_forward_passes_change_nothing(ranks: Ranks) -> None:
    """A checkpointed forward runs again on weights that were gathered for the backward."""
    plain = ranks(2)(gradients, Net, True, 1)
    for reshard in (True, False):
        for (_, expected), (found, grads) in zip(plain, ranks(2)(gradients, Checkpointed, reshard, 1), strict=True):
            assert not found
            assert all(torch.equal(grads[name], grad) for name, grad in expected.items())


@pytest.mark.parametrize("reshard", [True, False])
def test_accumulation(ranks: Ranks, reshard: bool) -> None:
    assert [found for found, _ in ranks(2)(gradients, Net, reshard, 3)] == [[], []]


def from_meta() -> list[str]:
    """Initialised after sharding, each rank its own rows."""
    with torch.device("meta"):
        model = Net(SOME, 64, 96)
    model = models.sharded(model)
    model.to_empty(device=models.place())
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.reset_parameters()
    found = models.complaints(model, "from meta")
    models.train(model, torch.optim.AdamW(model.parameters()), range(1), 64)
    return found + models.complaints(model, "from meta, after a step")


@pytest.mark.parametrize("world", [slow(2), 4])
def test_meta_initialisation(ranks: Ranks, world: int) -> None:
    assert ranks(world)(from_meta) == [[]] * world


OPTIMIZERS = {
    "adamw for-loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2]),
}
MORE_OPTIMIZERS = {  # without Rprop and fused SGD, which DTensor does not take under plain FSDP2 either
    "sgd for-loop": lambda p: torch.optim.SGD(p, lr=1e-2, foreach=False),
    "adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "asgd": torch.optim.ASGD,
}


def stepped_by(name: str) -> list[str]:
    """Two steps of an optimizer, and what it keeps: no state of our classes."""
    model = models.sharded(Net(FEW, 64, 96))
    optimizer = (OPTIMIZERS | MORE_OPTIMIZERS)[name](model.parameters())
    before = {name: parameter.full_tensor() for name, (parameter, _) in models.masters(model).items()}
    models.train(model, optimizer, range(2), 64)
    moved = {name for name, (p, _) in models.masters(model).items() if not torch.equal(p.full_tensor(), before[name])}
    found = models.complaints(model, name)
    return found + [f"{name} did not move" for name in before if name not in moved]


@pytest.mark.parametrize("name", [*OPTIMIZERS, *map(slow, MORE_OPTIMIZERS)])
def test_optimizers(ranks: Ranks, name: str) -> None:
    assert ranks(2)(stepped_by, name) == [[], []]
