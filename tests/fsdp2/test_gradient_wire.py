"""Gradients of FSDP2: that travel as FP8, the mean of what the messages hold, to the bit; in which dtype they are reduced.

As of torch 2.15 FSDP2 sets `grad_dtype` of what it has gathered, in which it accumulates; products
of plain modules stay in `param_dtype` then, and so do those of prepared weights.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

import zerocast
from tests.formats import model as formats
from tests.fsdp2 import models
from tests.fsdp2.models import place
from tests.traffic import Traffic
from tests.workers import Ranks, error_of, on_ranks
from zerocast.fsdp2 import set_grad_wire

FP8 = "fp8_1x128"
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def network() -> nn.Sequential:
    """Rows that ranks do not divide, and parts that are no multiples of 128 or of 16."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 5, bias=False)).to(place())


def loss_of(model: nn.Module, rank: int) -> Tensor:
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank + 1)).to(place())
    loss: Tensor = model(x).square().mean()
    return loss


def local_gradients(rank: int) -> list[Tensor]:
    """The gradients of one rank alone, in FP32."""
    model = network()
    loss_of(model, rank).backward()  # type: ignore[no-untyped-call]
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def part(gradients: list[Tensor], owner: int, world: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What FSDP2 sends to one rank: its rows of each gradient, with zeros up to as many as rank 0 has."""
    pieces = []
    for gradient in gradients:
        rows = -(-len(gradient) // world)
        padded = torch.zeros(world * rows, *gradient.shape[1:])
        padded[: len(gradient)] = gradient
        pieces.append(padded[owner * rows :][:rows].flatten())
    return torch.cat(pieces).numpy()


def reduced(reduce_dtype: torch.dtype, replicas: int) -> tuple[list[str], bool]:
    """The collectives of a backward pass, and whether every gradient of this rank is the mean of messages."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = world // replicas
    mesh = init_device_mesh(place(), (replicas, shards), mesh_dim_names=("replicate", "shard"))
    model = network()
    fully_shard(
        model, mesh=mesh if replicas > 1 else mesh["shard"], mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    )
    set_grad_wire(model, FP8)
    with Traffic() as traffic:
        loss_of(model, rank).backward()  # type: ignore[no-untyped-call]
    means = []
    for replica in range(replicas):
        senders = [local_gradients(replica * shards + shard) for shard in range(shards)]
        parts = [part([g.to(reduce_dtype).float() for g in gradients], rank % shards, shards) for gradients in senders]
        messages = [formats.gradient_message(p) for p in parts]
        mean = torch.from_numpy(formats.gradient_mean(messages, len(parts[0]), shards))
        means.append(mean.to(reduce_dtype).float())
    expected = torch.stack(means).mean(0)
    start, equal = 0, True
    for parameter in model.parameters():
        mine = parameter.grad.to_local().cpu()  # type: ignore[union-attr]
        equal &= torch.equal(mine.flatten(), expected[start : start + mine.numel()])
        start += -(-parameter.shape[0] // shards) * parameter.shape[1:].numel()
    return [kind for kind, _ in traffic.log], equal


@pytest.mark.parametrize(
    ("world", "reduce_dtype", "replicas"),
    [(2, torch.float32, 1), (3, torch.float32, 1), (2, torch.bfloat16, 1), (4, torch.float32, 2)],
)
def test_gradients_are_the_mean_of_messages(ranks: Ranks, world: int, reduce_dtype: torch.dtype, replicas: int) -> None:
    for kinds, equal in ranks(world)(reduced, reduce_dtype, replicas):
        assert equal
        assert Counter(kinds)["all-to-all"] == 1 and "reduce-scatter" not in kinds


def overflowed(value: float) -> tuple[bool, bool]:
    """Whether torch's norm of all gradients is finite on this rank, and whether this rank's parts of the last layer's are, where
    the first layer's gradient is `value` in a row on rank 0."""
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mp_policy=POLICY)
    set_grad_wire(model, FP8)

    def spoil(grad: Tensor) -> Tensor:
        row = torch.zeros_like(grad)
        row[:, 7] = value
        return grad + row

    if dist.get_rank() == 0:
        model[0].register_forward_hook(lambda _, __, out: out.register_hook(spoil) and None)
    loss_of(model, dist.get_rank()).backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    whole: Any = getattr(norm, "full_tensor", lambda: norm)()
    last: Any = model[2].weight.grad
    return bool(whole.isfinite()), bool(last.to_local().isfinite().all())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_seen_on_every_rank(ranks: Ranks, value: float) -> None:
    """E4M3 has no infinity: a group that holds one sends a NaN as its scale."""
    assert ranks(2)(overflowed, value) == [(False, True)] * 2
    assert ranks(2)(overflowed, 1.0) == [(True, True)] * 2


@on_ranks(2)
def test_refused_on_every_rank() -> None:
    model, rank = network(), dist.get_rank()
    unsharded = error_of(lambda: set_grad_wire(model, FP8))
    fully_shard(model)
    name = error_of(lambda: set_grad_wire(model, "fp8" if rank else FP8))
    difference = error_of(lambda: set_grad_wire(model, FP8 if rank else None))
    set_grad_wire(model, FP8)
    model.set_gradient_divide_factor(7.0)  # type: ignore[operator]
    factor = error_of(lambda: loss_of(model, 0).backward())  # type: ignore[no-untyped-call]
    assert unsharded.startswith("ValueError: set_grad_wire needs a model that fully_shard has sharded")
    assert name == "ValueError: rank 1: grad_wire is None or 'fp8_1x128', got 'fp8'"
    assert difference.startswith("ValueError: settings differ between ranks: grad_wire is None on rank 0")
    assert "scale the loss" in factor


# -- which dtype FSDP2 reduces in; products make gradients in the nominal one


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
