"""A backward pass through a forward pass of before a step: input gradients would be those of other weights."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocast
from tests import casts
from zerocast import CastPlan, QuantizedWeight, Recipe, ZeroAdamW, get_format
from zerocast.distributed.group import ONE_PROCESS
from zerocast.optim import EMA

SAID = "the weights changed between this forward pass and its backward pass"


class Trained:
    """Two quantized layers and their optimizer."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).bfloat16()
        zerocast.quantize_(self.model, Recipe({"*.weight": "nvfp4"}))
        self.optimizer = ZeroAdamW(self.model.named_parameters(), lr=0.1)
        self.average = EMA(self.optimizer, 0.5)
        self.step()

    def loss(self, x: Tensor | None = None) -> Tensor:
        return self.model(torch.randn(4, 32).bfloat16() if x is None else x).float().square().mean()

    def load(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.average.reset()

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()


def swapped(trained: Trained) -> Tensor:
    with trained.average.swapped():
        return trained.loss()


def changed(change: Callable[[Trained], object]) -> Callable[[Trained], Tensor]:
    def run(trained: Trained) -> Tensor:
        loss = trained.loss()
        change(trained)
        return loss

    return run


STALE: dict[str, Callable[[Trained], Tensor]] = {
    "a step": changed(Trained.step),
    "a load": changed(Trained.load),
    "an average": swapped,
    "an average, and a step": changed(lambda trained: (swapped(trained), trained.step())),
}


@pytest.mark.notices(
    "a backward pass after a step, a load or a swap uses an earlier forward pass",
    where=("ZeroAdamW", "CastPlan"),
    answer="raises if it reads a quantized weight that has changed; not in compiled graphs",
)
@pytest.mark.parametrize("case", STALE)
def test_a_graph_of_other_weights(case: str) -> None:
    trained = Trained()
    loss = STALE[case](trained)
    with pytest.raises(RuntimeError, match=SAID):
        loss.backward()
    trained.optimizer.zero_grad()
    trained.step()


def test_a_product_that_does_not_read_the_weight_again() -> None:
    trained = Trained()
    loss = trained.model[0](torch.randn(4, 32).bfloat16()).float().square().mean()
    trained.step()
    loss.backward()


@pytest.mark.parametrize("split", [False, True])
def test_a_plan(split: bool) -> None:
    """Of several optimizers none says which weights it has changed, so nothing is said of any."""
    weights = [casts.cast_whole("fp8_current", torch.randn(32, 32)) for _ in range(2)]
    masters = [nn.Parameter(torch.randn(32 * 32)) for _ in weights]
    plan = CastPlan(weights, [master.detach() for master in masters], [0, 0], ONE_PROCESS)
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in ([masters[:1], masters[1:]] if split else [masters])]
    handles = [plan.attach(optimizer) for optimizer in optimizers]
    plan.cast()
    plan.post_all_gather()
    x = torch.randn(4, 32).bfloat16().requires_grad_()
    loss = nn.functional.linear(x, weights[0]).float().sum()
    for master in masters:
        master.grad = torch.ones_like(master)
    optimizers[-1].step()
    plan.post_all_gather()
    with contextlib.nullcontext() if split else pytest.raises(RuntimeError, match=SAID):
        loss.backward()
    for handle in handles:
        handle.remove()


def test_a_graph_of_a_weight_whose_format_changes() -> None:
    weight: Any = nn.Parameter(casts.cast_whole("nvfp4", torch.randn(32, 32)))
    product = nn.functional.linear(torch.randn(4, 32, dtype=torch.bfloat16, requires_grad=True), weight)
    weight.convert(get_format("fp8_block"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_the_format_of_a_weight_without_graphs_changes() -> None:
    """Inference tensors have no counter of writes to raise."""
    with torch.inference_mode():
        weight = QuantizedWeight.empty((32, 32), "nvfp4")
        weight.convert(get_format("fp8_block"))
    assert weight.format == get_format("fp8_block")
