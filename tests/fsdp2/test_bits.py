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
from tests.workers import Ranks, on_ranks

PLACES = [(3, 96), (4, 32)]  # ranks and rows: boundaries on blocks and in them, empty shards of scales
MORE_PLACES = [(world, hidden) for hidden in (32, 96, 160) for world in (1, 2, 3, 4) if (world, hidden) not in PLACES]


SOME = (*FEW, "mxfp8")  # one of each rule for scales; every format is in the first test


def trained(formats: tuple[str, ...], width: int, hidden: int, options: dict[str, Any], steps: int = 2) -> None:
    check_steps(Net(formats, width, hidden), width, "AdamW", options, steps)


def check_steps(net: Any, width: int, optimizer: str, options: dict[str, Any], steps: int = 2) -> None:
    """Check the bytes at the start and after each step."""
    model = models.sharded(net, **options)
    stepped = models.OPTIMIZERS[optimizer](model)
    models.check(model, "at the start")
    for step in range(steps):
        models.train(model, stepped, range(step, step + 1), width)
        models.check(model, f"after step {step}")


@pytest.mark.shows(host="FSDP2", parallel="data", formats=FORMATS)
@pytest.mark.parametrize(("world", "hidden"), [*PLACES, *(slow(*place) for place in MORE_PLACES)])
@on_ranks()
def test_every_format(hidden: int) -> None:
    trained(FORMATS, 64, hidden, {}, steps=1)


@pytest.mark.parametrize(("world", "hidden"), [(4, 1), (2, 129), slow(2, 1), slow(4, 129)])
@on_ranks()
def test_fewer_rows_than_ranks_and_odd_rows(hidden: int) -> None:
    trained(SMALL, 130, hidden, {}, steps=1)


@pytest.mark.parametrize("world", [slow(2), 3])
@given(data=st.data())
@settings(max_examples=5)
def test_any_shape(ranks: Ranks, world: int, data: st.DataObject) -> None:
    fmt = data.draw(st.sampled_from(FORMATS))
    unit = 32 if fmt not in SMALL else 1
    width, hidden = (unit * data.draw(st.integers(1, 320 // unit)) for _ in range(2))
    ranks(world)(trained, (fmt,), width, hidden, {}, 1)


@pytest.mark.parametrize(
    ("dtype", "reshard"), [(None, False), (torch.float16, True), slow(None, True), slow(torch.float16, False)]
)
@on_ranks(2)
def test_reshard_and_dtype(reshard: bool, dtype: torch.dtype | None) -> None:
    trained(SOME, 64, 96, {"reshard_after_forward": reshard, "mp_policy": MixedPrecisionPolicy(param_dtype=dtype)})


def on_mesh(shape: tuple[int, int]) -> None:
    """Train with hybrid sharding, replicas by shards."""
    trained(SOME, 64, 96, {"mesh": models.mesh(shape, ("replicate", "shard"))})


@pytest.mark.shows(
    host="FSDP2",
    parallel=lambda shape: "replicas" if shape[1] == 1 else "data, replicas",
    formats=SOME,
    ranks=lambda shape: shape[0] * shape[1],
)
@pytest.mark.parametrize("shape", [(2, 1), (2, 2), slow((4, 1))])
def test_replicas(ranks: Ranks, shape: tuple[int, int]) -> None:
    ranks(shape[0] * shape[1])(on_mesh, shape)


class Checkpointed(Net):
    """A Net with activation checkpointing of every block."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add outputs of blocks that the backward pass recomputes."""
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def gradients(make: type[nn.Module], reshard: bool, micro_batches: int) -> None:
    """Take two steps with accumulated micro-batches and check the weights."""
    model = models.sharded(make(SOME, 64, 96), reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(2):
        for index in range(micro_batches):
            model.set_requires_gradient_sync(index == micro_batches - 1)
            x = models.batch(10 * step + index, 64).requires_grad_()
            model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    models.check(model, "accumulated")


def from_meta() -> None:
    """Initialise after sharding, each rank its own rows."""
    with torch.device("meta"):
        model = Net(SOME, 64, 96)
    model = models.sharded(model)
    model.to_empty(device=models.place())
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.reset_parameters()
    models.check(model, "from meta")
    models.train(model, models.OPTIMIZERS["AdamW"](model), range(1), 64)
    models.check(model, "from meta, after a step")


@on_ranks(slow(2), 4)
def test_meta_initialisation() -> None:
    from_meta()
