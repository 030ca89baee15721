"""A backward pass through a forward pass of before the weights changed: input gradients would be those of other weights.

Steps, casts and switches of every host: tests/hosts/test_matrix.py.
"""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from tests import casts
from tests.weight.test_owners import backward, network
from zerocast import CastPlan, QuantizedWeight, ZeroAdamW, get_format
from zerocast.distributed.group import ONE_PROCESS
from zerocast.optim import EMA

SAID = "the weights changed between this forward pass and its backward pass"


@pytest.mark.notices(
    "a backward pass after a step, a load or a swap uses an earlier forward pass",
    where=("ZeroAdamW", "CastPlan"),
    answer="raises if it reads a quantized weight that has changed; not in compiled graphs",
)
@pytest.mark.parametrize("change", ["an average", "an average, and a step", "a load"])
def test_a_graph_of_other_weights(change: str) -> None:
    model = network()
    optimizer = ZeroAdamW(model.named_parameters(), lr=0.1)
    average = EMA(optimizer, 0.5)
    backward(model)
    optimizer.step()
    with contextlib.nullcontext() if change == "a load" else average.swapped():
        loss = model(torch.randn(4, 32).bfloat16()).float().square().mean()
    if change == "an average, and a step":
        backward(model)
        optimizer.step()
    if change == "a load":
        optimizer.load_state_dict(optimizer.state_dict())
        average.reset()
    with pytest.raises(RuntimeError, match=SAID):
        loss.backward()
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def test_a_product_that_does_not_read_the_weight_again() -> None:
    """Its input needs no gradient."""
    model = network()
    optimizer = ZeroAdamW(model.named_parameters(), lr=0.1)
    loss = model[0](torch.randn(4, 32).bfloat16()).float().square().mean()
    backward(model)
    optimizer.step()
    loss.backward()


@pytest.mark.parametrize("split", [False, True])
def test_a_plan(split: bool) -> None:
    """Of several optimizers none says which weights it has changed, so nothing is said of any."""
    weights = [casts.cast_whole("fp8_current", torch.randn(32, 32)) for _ in range(2)]
    masters = [nn.Parameter(torch.randn(32 * 32)) for _ in weights]
    plan = CastPlan(weights, [master.detach() for master in masters], [0, 0], ONE_PROCESS)
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in ([masters[:1], masters[1:]] if split else [masters])]
    for optimizer in optimizers:
        plan.attach(optimizer)
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


def test_the_format_of_a_weight_without_graphs_changes() -> None:
    """Inference tensors have no counter of writes to raise."""
    with torch.inference_mode():
        weight: Any = QuantizedWeight.empty((32, 32), "nvfp4")
        weight.convert(get_format("fp8_block"))
    assert weight.format == get_format("fp8_block")
