"""The dtype of gradients: which one FSDP2 reduces in, and that products make them in the nominal one.

As of torch 2.15 FSDP2 sets `grad_dtype` of what it has gathered, in which it accumulates; products
of plain modules stay in `param_dtype` then, and so do those of prepared weights.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

import zerocast
from tests.fsdp2 import models
from tests.traffic import Traffic
from tests.workers import on_ranks

BF16, FP32 = torch.bfloat16, torch.float32
FOLLOWS_MASTERS = hasattr(FSDPParam, "unsharded_grad_dtype")  # as of torch 2.15


def one_layer(prepared: bool, policy: MixedPrecisionPolicy) -> Any:
    """A linear layer of 64x96 without a bias; the same on all ranks."""
    torch.manual_seed(0)
    layer = nn.Linear(96, 64, bias=False, device=models.place())
    if prepared:
        zerocast.fsdp2.prepare(layer, {"weight": "nvfp4"})
    return fully_shard(layer, mesh=models.mesh(), mp_policy=policy)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(("reduce_dtype", "nbytes"), [(BF16, 2), (FP32, 4), (None, 4 if FOLLOWS_MASTERS else 2)])
@on_ranks(2)
def test_bytes_of_a_reduction(prepared: bool, reduce_dtype: torch.dtype | None, nbytes: int) -> None:
    """`reduce_dtype` says it, in any torch; without one they are FSDP2's, prepared or not."""
    layer = one_layer(prepared, MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype))
    with Traffic() as seen:
        layer(models.batch(0, 96)).float().square().mean().backward()
    assert layer.weight.grad.dtype is FP32
    assert [nbytes / layer.weight.numel() for nbytes in seen.sent["reduce-scatter"]] == [nbytes]


@on_ranks(2)
def test_other_gradients_are_refused() -> None:
    model = models.sharded(models.Net(("nvfp4",), 64, 96))
    optimizer = zerocast.fsdp2.FusedAdamW(model.parameters(), lr=1e-2)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float16
        parameter.grad = torch.ones_like(parameter, dtype=torch.float16)
    said = "gradients are float32 or bfloat16, one is torch.float16: set grad_dtype of its parameter"
    with pytest.raises(TypeError, match=said):
        optimizer.step()
    assert all(map(torch.equal, before, (p.to_local() for p in model.parameters())))
