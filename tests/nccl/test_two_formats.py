"""Formats of two on GPUs: the bytes of the unsharded casts to both, in plans, under ZeroAdamW and under FSDP2."""

from typing import Any

import pytest
import torch
from torch import nn

import zerocast
from tests import casts
from tests.cast.test_two_formats import SHAPE, both
from tests.devices import gpu_params, worlds_of_gpus
from tests.fsdp2 import test_bits
from zerocast import CastPlan, QuantizedWeight, Recipe

PAIRS = ("fp8_current|nvfp4", "fp8_block|mxfp4", "nvfp4|fp8_current:element=e5m2", "mxfp4|nvfp4")


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("on_gpu", gpu_params())
def test_a_plan(on_gpu: str, pair: str) -> None:
    master = torch.randn(SHAPE) * torch.logspace(-2, 2, SHAPE[0])[:, None]
    weight = QuantizedWeight.empty(SHAPE, pair, device="cuda")
    CastPlan([weight], [master.view(-1).cuda()], [0], backend=on_gpu).cast()
    casts.assert_same_bytes(casts.bytes_of(weight), both(pair, master), pair)


def trained(pair: str) -> str:
    """What `verify` says against steps of ZeroAdamW."""
    torch.manual_seed(0)
    layer = zerocast.quantize_(nn.Linear(256, 128, bias=False), Recipe({"weight": pair}), dtype=torch.bfloat16).cuda()
    optimizer = zerocast.ZeroAdamW(layer.named_parameters(), lr=1e-2)
    for _ in range(3):
        layer(torch.randn(128, 256, dtype=torch.bfloat16, device="cuda")).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    report = zerocast.verify(optimizer)
    return "" if report.ok else str(report)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("world", worlds_of_gpus(1, 2))
def test_zero_adamw(gpu_ranks: Any, world: int, pair: str) -> None:
    assert gpu_ranks(world)(trained, pair, timeout=120.0) == [""] * world


@pytest.mark.parametrize("world", worlds_of_gpus(1, 2))
def test_fsdp2(gpu_ranks: Any, world: int) -> None:
    assert gpu_ranks(world)(test_bits.trained, PAIRS, 64, 96, {}, timeout=120.0) == [[]] * world
