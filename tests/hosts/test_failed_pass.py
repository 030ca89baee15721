"""An exception in a forward or backward pass of one rank alone, which nobody tells the others."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zerocast
from tests.fsdp2 import models
from tests.workers import Ranks, error_of

CULPRIT, SECONDS = 1, 3.0
WIDTH = 64


class Raises(torch.autograd.Function):
    """Of its input, but for a pass that is to raise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str) -> Tensor:
        ctx.where = where
        if where == "forward":
            raise ValueError("of the user")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.where == "backward":
            raise ValueError("of the user")
        return gradient, None


class Net(nn.Module):
    """Two layers, between which a pass may raise: some of the rank's collectives have begun by then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.where = ""

    def forward(self, x: Tensor) -> Tensor:
        """Run both."""
        out: Tensor = self.last(Raises.apply(self.first(x), self.where))
        return out


def built(host: str, group: Any, case: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of the host, and its optimizer, whose collectives give up after `SECONDS`."""
    torch.manual_seed(0)
    model = Net()
    if host == "ZeroAdamW":
        zerocast.quantize_(model, zerocast.Recipe({"*.weight": "fp8_current"}))
        config = zerocast.ZeroConfig(bucket_size=1)
        return model, zerocast.ZeroAdamW(model.named_parameters(), lr=1e-2, group=group, config=config)
    if host == "FSDP2":
        zerocast.fsdp2.prepare(model, zerocast.Recipe({"*.weight": "fp8_current"}))
    # With a name of its own, since torch caches meshes that are equal, and this one's group is broken after the case.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(case,))
    for layer in (model.first, model.last, model):
        models.fully_shard(layer, mesh=mesh)
    kind = zerocast.fsdp2.FusedAdamW if host == "FSDP2" else torch.optim.AdamW
    return model, kind(model.parameters(), lr=1e-2)


def masters(model: nn.Module, optimizer: Any) -> list[Tensor]:
    if isinstance(optimizer, zerocast.ZeroAdamW):
        return [
            view.master.clone()
            for views in optimizer.master_views()
            for view in views.masters
            if view.master is not None
        ]
    return [parameter.to_local().detach().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]


def one_pass_raises(host: str, where: str) -> tuple[str, float, bool]:
    """What this rank is told in its second step, in how many seconds, and whether its masters are those of the first."""
    model, optimizer = built(host, dist.new_group(timeout=timedelta(seconds=SECONDS)), f"{host} {where}")

    def step(number: int) -> None:
        model(models.batch(number, WIDTH)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    before = masters(model, optimizer)
    model.where = where if dist.get_rank() == CULPRIT else ""  # type: ignore[assignment]
    began = time.monotonic()
    said = error_of(lambda: step(1))
    seconds = time.monotonic() - began
    dist.barrier()
    return said, seconds, all(map(torch.equal, before, masters(model, optimizer)))


@pytest.mark.notices(
    "a forward or backward pass raises on one rank alone",
    where=("ZeroAdamW", "FSDP2"),
    answer="that rank has its error; the others wait for it in their next collective for the timeout of their group, as in "
    "bf16, and take no step",
)
@pytest.mark.parametrize("where", [models.slow("forward"), "backward"])
@pytest.mark.parametrize("host", ["ZeroAdamW", "FSDP2", "plain FSDP2"])
def test_a_pass_that_raises_on_one_rank(ranks: Ranks, host: str, where: str) -> None:
    for rank, (said, seconds, is_unchanged) in enumerate(ranks(2)(one_pass_raises, host, where)):
        assert ("of the user" if rank == CULPRIT else "Timed out") in said
        assert seconds < 3 * SECONDS
        assert is_unchanged
