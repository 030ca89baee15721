"""The dtype of gradients: which one FSDP2 reduces in, and that products make them in the nominal one.

As of torch 2.15 FSDP2 sets `grad_dtype` of what it has gathered, in which it accumulates; products
of plain modules stay in `param_dtype` then, and so do those of prepared weights.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import distribute_tensor

import zerocast
from tests.fsdp2 import models, traffic
from tests.workers import Ranks

BF16, FP32 = torch.bfloat16, torch.float32
FOLLOWS_MASTERS = hasattr(FSDPParam, "unsharded_grad_dtype")  # as of torch 2.15


def one_layer(prepared: bool, policy: MixedPrecisionPolicy) -> Any:
    """A linear layer of 64x96 without a bias; the same on all ranks."""
    torch.manual_seed(0)
    layer = nn.Linear(96, 64, bias=False, device=models.place())
    if prepared:
        zerocast.fsdp2.prepare(layer, {"weight": "nvfp4"})
    return fully_shard(layer, mesh=models.mesh(), mp_policy=policy)


def reduced(prepared: bool, reduce_dtype: torch.dtype | None) -> list[float]:
    """Bytes an element in each reduce-scatter of a backward pass."""
    layer = one_layer(prepared, MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype))
    with traffic.Traffic() as seen:
        layer(models.batch(0, 96)).float().square().mean().backward()
    assert layer.weight.grad.dtype is FP32
    return [nbytes / layer.weight.numel() for nbytes in seen.sent["reduce-scatter"]]


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(("reduce_dtype", "nbytes"), [(BF16, 2), (FP32, 4), (None, 4 if FOLLOWS_MASTERS else 2)])
def test_bytes_of_a_reduction(ranks: Ranks, prepared: bool, reduce_dtype: torch.dtype | None, nbytes: int) -> None:
    """`reduce_dtype` says it, in any torch; without one they are FSDP2's, prepared or not."""
    assert ranks(2)(reduced, prepared, reduce_dtype) == [[nbytes]] * 2


def accumulated(micro_batches: int) -> tuple[Tensor, Tensor]:
    """The gradient of micro-batches that are reduced once, and the sum of those of each, rounded to
    bf16 as a product rounds them. All ranks have the same input, whose mean is exact.
    """
    found = []
    for parts in ([range(micro_batches)], [[index] for index in range(micro_batches)]):
        layer, total = one_layer(True, models.BF16), torch.zeros(64, 96, device=models.place())
        for indices in parts:
            for index in indices:
                layer.set_requires_gradient_sync(index == indices[-1])
                layer(models.batch(index, 96, rank=0)).float().square().sum().backward()
            total += layer.weight.grad.full_tensor()
            layer.weight.grad = None
        found.append(total.cpu())
    return found[0], found[1]


@pytest.mark.parametrize("world", [1, 2])
def test_accumulated_gradients_are_rounded_by_their_product(ranks: Ranks, world: int) -> None:
    """As those of plain modules: no product is taken in FP32 since FSDP2 accumulates in it."""
    for together, one_by_one in ranks(world)(accumulated, 3):
        assert torch.equal(together, one_by_one)


def stepped(dtypes: tuple[torch.dtype, ...]) -> tuple[list[str], list[Tensor]]:
    """Complaints and masters after steps of FusedAdamW over gradients that bf16 holds, those of the
    i-th parameter in step s in `dtypes[i + s]`, and so on from the beginning.
    """
    model = models.sharded(models.Net(models.FEW, 64, 96))
    optimizer = zerocast.fsdp2.FusedAdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        for index, parameter in enumerate(model.parameters()):
            seed = torch.Generator().manual_seed(100 * step + index)
            whole = torch.randn(parameter.shape, generator=seed).to(BF16)
            dtype = dtypes[(index + step) % len(dtypes)]
            parameter.grad, parameter.grad_dtype = None, dtype
            parameter.grad = distribute_tensor(
                whole.to(dtype).to(models.place()), parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        optimizer.step()
    found = models.complaints(model, "stepped")
    return found, [parameter.full_tensor().cpu() for parameter in models.held(model)]


@pytest.mark.parametrize("dtypes", [(BF16,), (BF16, FP32), (FP32, FP32, BF16)])
def test_an_optimizer_reads_each_gradient_in_its_dtype(ranks: Ranks, dtypes: tuple[torch.dtype, ...]) -> None:
    """Which `grad_dtype` of its parameter chooses; one launch read all by the dtype of the first."""
    for (none, expected), (found, masters) in zip(ranks(2)(stepped, (FP32,)), ranks(2)(stepped, dtypes), strict=True):
        assert none == found == []
        assert all(map(torch.equal, expected, masters))


def refused() -> tuple[str, bool]:
    """What a step over FP16 gradients says, and whether the masters stayed as they were."""
    model = models.sharded(models.Net(("nvfp4",), 64, 96))
    optimizer = zerocast.fsdp2.FusedAdamW(model.parameters(), lr=1e-2)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float16
        parameter.grad = torch.ones_like(parameter, dtype=torch.float16)
    with pytest.raises(TypeError) as raised:
        optimizer.step()
    return str(raised.value), all(map(torch.equal, before, (p.to_local() for p in model.parameters())))


def test_other_gradients_are_refused(ranks: Ranks) -> None:
    for message, same in ranks(2)(refused):
        assert "gradients are float32 or bfloat16, one is torch.float16: set grad_dtype of its parameter" in message
        assert same
