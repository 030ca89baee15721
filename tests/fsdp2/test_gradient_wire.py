"""Gradients of FSDP2: that travel as FP8, the mean of what the messages hold, to the bit; in which dtype they are reduced.

As of torch 2.15 FSDP2 sets `grad_dtype` of what it has gathered, in which it accumulates; products
of plain modules stay in `param_dtype` then, and so do those of prepared weights.
"""

from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.profiler import profile

import zerocast
from tests.formats import model as formats
from tests.fsdp2 import models
from tests.fsdp2.models import place
from tests.observed import Traffic
from tests.workers import Ranks, error_of, on_ranks
from zerocast import backends
from zerocast.fsdp2 import reduction, set_grad_wire

FP8 = "fp8_1x128"
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def network() -> nn.Sequential:
    """Return a network with rows that ranks do not divide, and parts that are no multiples of 128 or of 16."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 5, bias=False)).to(place())


def loss_of(model: nn.Module, rank: int) -> Tensor:
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank + 1)).to(place())
    loss: Tensor = model(x).square().mean()
    return loss


def local_gradients(rank: int) -> list[Tensor]:
    """Return the gradients of one rank alone, in FP32."""
    model = network()
    loss_of(model, rank).backward()  # type: ignore[no-untyped-call]
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def part(gradients: list[Tensor], owner: int, world: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return what FSDP2 sends to one rank: its rows of each gradient, padded with zeros to the rows of rank 0."""
    pieces = []
    for gradient in gradients:
        rows = -(-len(gradient) // world)
        padded = torch.zeros(world * rows, *gradient.shape[1:])
        padded[: len(gradient)] = gradient
        pieces.append(padded[owner * rows :][:rows].flatten())
    return torch.cat(pieces).numpy()


def reduced(reduce_dtype: torch.dtype, replicas: int) -> tuple[list[str], bool]:
    """Return the collectives of a backward pass, and whether every gradient of this rank is the mean of messages."""
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


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1.0])
@on_ranks(2)
def test_a_gradient_that_is_not_finite_is_seen_on_every_rank(value: float) -> None:
    """The first layer's gradient is `value` in a row on rank 0. E4M3 has no infinity: a group that holds one sends a NaN as its
    scale. The gradient of the last layer is finite.
    """
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
    assert bool(whole.isfinite()) == (value == 1.0)
    assert last.to_local().isfinite().all()


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
    """Return a linear layer of 64x96 without a bias, the same on all ranks."""
    torch.manual_seed(0)
    layer = nn.Linear(96, 64, bias=False, device=models.place())
    if prepared:
        zerocast.fsdp2.prepare(layer, {"weight": "nvfp4"})
    return fully_shard(layer, mesh=models.mesh(), mp_policy=policy)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(("reduce_dtype", "nbytes"), [(BF16, 2), (FP32, 4), (None, 4 if FOLLOWS_MASTERS else 2)])
@on_ranks(2)
def test_bytes_of_a_reduction(prepared: bool, reduce_dtype: torch.dtype | None, nbytes: int) -> None:
    """`reduce_dtype` sets the bytes in any torch. Without one they are FSDP2's, prepared or not."""
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


# -- gradients are laid out for a reduction as FSDP2's own op does it, without the op


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "reduce_dtype"), [(BF16, FP32), (BF16, BF16), (FP32, FP32)])
@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_bits_of_a_launch(dtype: torch.dtype, reduce_dtype: torch.dtype, ranks: int) -> None:
    """A launch gives the op's bits for whole thread blocks and rests, unaligned addresses, more gradients than
    a launch takes, and one that is not contiguous.
    """
    shapes = [(12288, 64), (6, 5), (12,), (6, 2, 4), *[(6, 8)] * 70]
    values = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    values[0].view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -0.0])
    values.append(torch.randn(8, 6, device="cuda").to(dtype).t())
    numel = sum(value.numel() for value in values)
    expected, memory = torch.full((2, ranks, numel // ranks), torch.nan, dtype=reduce_dtype, device="cuda")
    torch.ops.fsdp.chunk_cat(values, dim=0, num_chunks=ranks, out=expected)
    assert reduction.lay_out(values, 0, ranks, out=memory)
    bits = torch.int32 if reduce_dtype is FP32 else torch.int16
    assert torch.equal(memory.view(bits), expected.view(bits))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("numel", [12288 * 64, 8193, 5])
def test_bits_of_a_sum(numel: int, offset: int) -> None:
    """A launch adds a gradient with torch's bits, for whole thread blocks and rests and unaligned addresses."""
    first, second = torch.randn(2, numel + offset, device="cuda").to(BF16)[:, offset:]
    first[:3] = torch.tensor([torch.nan, torch.inf, -0.0])
    total = reduction.accumulate(first, None)
    assert total is not None
    assert torch.equal(total.view(torch.int32), first.float().view(torch.int32))
    expected = total + second
    assert reduction.accumulate(second, total) is total
    assert torch.equal(total.view(torch.int32), expected.view(torch.int32))


def copies(gradients: list[Tensor], ranks: int, out: Tensor) -> None:
    """Stand in for `lay_out` of the backend `cuda` by copies."""
    of_ranks = [torch.cat([gradient.view(ranks, -1)[rank] for gradient in gradients]) for rank in range(ranks)]
    out.copy_(torch.stack(of_ranks).view(out.shape))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_sums_that_are_left_to_fsdp2(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 adds up gradients and totals of other dtypes, classes or layouts, and with a graph."""
    monkeypatch.setattr(backends, "choose", lambda device: backend)
    gradient, total = torch.ones(4, 6, dtype=BF16), torch.ones(4, 6)
    assert reduction.accumulate(gradient.float(), total) is None
    assert reduction.accumulate(torch.ones(6, 4, dtype=BF16).t(), total) is None
    assert reduction.accumulate(gradient, total.bfloat16()) is None
    assert reduction.accumulate(gradient, torch.ones(6, 4).t()) is None
    assert reduction.accumulate(gradient.as_subclass(nn.Buffer), total) is None
    assert reduction.accumulate(gradient.clone().requires_grad_(), total) is None
    assert (total == 1).all()
    assert reduction.accumulate(gradient, total) is total
    assert (total == 2).all()
    first = reduction.accumulate(gradient, None)
    assert first is not None
    assert torch.equal(first, torch.ones(4, 6))


def test_what_the_op_has_to_do() -> None:
    """The op has to lay out rows that ranks do not share equally, other dtypes, another dimension and other backends."""
    rows, memory = torch.ones(4, 6), torch.full((2, 12), torch.nan)
    assert not reduction.lay_out([rows], 0, 2, out=memory)
    with mock.patch.object(backends.load("cpu"), "lay_out", copies, create=True):
        assert not reduction.lay_out([rows], 1, 2, out=memory)
        assert not reduction.lay_out([torch.ones(3, 8)], 0, 2, out=memory)
        assert not reduction.lay_out([rows.half()], 0, 2, out=memory)
        assert not reduction.lay_out([rows[:2], rows[2:].bfloat16()], 0, 2, out=memory)
        assert not reduction.lay_out([rows], 0, 2, out=memory.bfloat16())
        assert memory.isnan().all()
        assert reduction.lay_out([rows.bfloat16()], 0, 2, out=memory)
    assert (memory == 1).all()


class FirstRank:
    """A reduce-scatter that gives the part of the first of two ranks."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(size, torch.nan, dtype=dtype, device=device)

    def __call__(self, *, output_tensor: Tensor, input_tensor: Tensor, **rest: object) -> None:
        assert type(input_tensor) is Tensor
        output_tensor.copy_(input_tensor[: len(output_tensor)])


@pytest.mark.parametrize("input_first", [True, False])
@pytest.mark.parametrize("by_op", [True, False])
def test_the_order_of_allocations(input_first: bool, by_op: bool) -> None:
    """A torch that allocates the result before the input has the same gradients."""
    reduce_scatter = reduction.LaidOutReduceScatter(FirstRank())
    sizes = [(12,), (6,)] if input_first else [(6,), (12,)]
    memory = [reduce_scatter.allocate(size, dtype=FP32, device=torch.device("cpu")) for size in sizes]
    source, result = memory if input_first else memory[::-1]
    values = [torch.randn(4, 2), torch.randn(2, 2)]
    with mock.patch.object(backends.load("cpu"), "lay_out", None if by_op else copies, create=True):
        torch.ops.fsdp.chunk_cat(values, dim=0, num_chunks=2, out=source.view(2, -1))
    reduce_scatter(result, source, None, None)
    assert torch.equal(result.as_subclass(Tensor), torch.cat([values[0][:2].flatten(), values[1][0]]))


def gradients(rows: int, reduce_dtype: torch.dtype, wire: str | None, by_op: bool) -> tuple[list[Tensor], int]:
    """Return the gradients of two layers after four backward passes, two of which reduce nothing; and how often the
    op ran.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, rows), nn.Linear(rows, 64)).to(models.place())
    zerocast.fsdp2.prepare(model, {"*.weight": "fp8_current"})
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    fully_shard(model, mesh=models.mesh(), mp_policy=policy)
    assert isinstance(model, FSDPModule)
    if wire:
        zerocast.fsdp2.set_grad_wire(model, wire)
    backend = backends.load("cpu")
    with mock.patch.object(backend, "lay_out", None if by_op else copies, create=True), profile() as events:
        for step in range(4):
            model.set_requires_gradient_sync(step in (0, 3))
            model(models.batch(step, 64)).float().square().mean().backward()
    ops = sum(event.count for event in events.key_averages() if event.key == "aten::_chunk_cat")
    return [parameter.grad.full_tensor().cpu() for parameter in model.parameters()], ops


@pytest.mark.parametrize(
    ("rows", "reduce_dtype", "wire"),
    [(96, BF16, None), (96, FP32, "fp8_1x128"), (95, BF16, "fp8_1x128"), (95, FP32, None), models.slow(96, FP32, None)],
)
def test_gradients(ranks: Ranks, rows: int, reduce_dtype: torch.dtype, wire: str | None) -> None:
    """Each wire gives the op's bits, also where rows are left over and the op has to do it."""
    ours, of_op = (ranks(2)(gradients, rows, reduce_dtype, wire, by_op)[0] for by_op in (False, True))
    assert (ours[1], of_op[1]) == (0 if rows == 96 else 2, 2)
    assert list(map(torch.equal, ours[0], of_op[0])) == [True] * 4
