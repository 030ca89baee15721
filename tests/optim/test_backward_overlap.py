"""Reduction runs during the backward pass: it starts before the last gradient exists, and in one order on every rank."""

import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zerocast
from tests.observed import same_on_all
from tests.optim.traffic import recorded
from tests.workers import on_ranks
from zerocast import ZeroAdamW, ZeroConfig
from zerocast.distributed.group import Group
from zerocast.optim.reduction import Reduction

LAYERS = 6


def model(fmt: str | None) -> nn.Sequential:
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    if fmt is not None:
        zerocast.quantize_(layers, zerocast.Recipe({"*.weight": fmt}))
    return layers


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("fmt", [None, "nvfp4", "mxfp8"])
@pytest.mark.parametrize("how", [{}, {"deterministic": True}, {"grad_wire": "fp8_1x128"}], ids=str)
@on_ranks(2)
def test_the_first_reduction_starts_before_the_last_gradient_exists(fmt, how, stage):
    """Gradients as autograd has them ready, and collectives, which are in one order on every rank."""
    layers, kind = model(fmt), "all-to-all" if how else "reduce-scatter"
    optimizer = ZeroAdamW(layers.named_parameters(), stage=stage, config=ZeroConfig(bucket_size=64 * 64, **how))
    with recorded() as log:
        for name, parameter in layers.named_parameters():
            parameter.register_hook(lambda _, name=name: log.append((name, 0)))
        layers(torch.randn(2, 64)).sum().backward()  # type: ignore[no-untyped-call]
    del optimizer
    events = same_on_all([event for event, _ in log])
    names = [name for name in events if name != kind]
    assert len(names) == 2 * LAYERS
    for layer in range(LAYERS - 1):
        last_of_bucket, next_layer = f"{LAYERS - 1 - layer}.weight", f"{LAYERS - 2 - layer}.weight"
        assert events.index(last_of_bucket) < events.index(next_layer)
    before_the_last_gradient = events[: max(events.index(name) for name in names)]
    assert before_the_last_gradient.count(kind) >= LAYERS - 2
    assert events.index(kind) < events.index(f"{LAYERS - 3}.weight"), "the first starts once its bucket is full"


@on_ranks(2)
def test_reductions_of_two_passes_in_flight_land_in_order():
    """Beside another optimizer a reduction outlives its pass; FP32 is otherwise reduced into the shard itself."""
    reduce, number = Group.reduce_scatter_mean, itertools.count()

    def call(group: Group, out: torch.Tensor, full: torch.Tensor, async_op: bool = False, what: str = "") -> Any:
        if next(number):
            return reduce(group, out, full)
        return SimpleNamespace(wait=lambda: reduce(group, out, full))  # the first one runs when it is waited for

    first, second = (nn.Linear(16, 16, bias=False) for _ in range(2))
    optimizer, beside = (ZeroAdamW(model.named_parameters()) for model in (first, second))
    with (
        mock.patch.object(Reduction, "is_complete", return_value=False),
        mock.patch.object(Group, "reduce_scatter_mean", call),
    ):
        for factor in (1.0, 2.0):
            optimizer.zero_grad()
            (first(torch.ones(1, 16)).sum() * factor).backward()  # type: ignore[no-untyped-call]
        assert first.weight.grad is not None
        whole: torch.Tensor = first.weight.grad.full_tensor()  # type: ignore[attr-defined]
    del beside
    assert torch.equal(whole, torch.full((16, 16), 2.0))
