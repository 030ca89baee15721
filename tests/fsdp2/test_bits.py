"""Gathered weights are the unsharded cast of the whole masters, bit for bit, before and after optimizer steps."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from tests.fsdp2 import models
from tests.fsdp2.models import FEW, FORMATS, SMALL, Net, slow
from tests.workers import Ranks

PLACES = [(3, 96), (4, 32)]  # ranks and rows: boundaries on blocks and in them, empty shards of scales
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
    """Assert that no rank complains."""
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
        """Add outputs of blocks that the backward pass recomputes."""
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
