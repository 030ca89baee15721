"""Gradients are laid out for a reduction as FSDP2's own op does it, without the op."""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.profiler import profile

import zerocast
from tests.fsdp2 import models
from tests.workers import Ranks
from zerocast import backends
from zerocast.fsdp2 import reduction

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "reduce_dtype"), [(BF16, FP32), (BF16, BF16), (FP32, FP32)])
@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_bits_of_a_launch(dtype: torch.dtype, reduce_dtype: torch.dtype, ranks: int) -> None:
    """Whole thread blocks, what is left of them, addresses that vectors cannot load, more gradients
    than a launch takes, and one that is not contiguous.
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


def copies(gradients: list[Tensor], ranks: int, out: Tensor) -> None:
    """`lay_out` of the backend `cuda` by copies."""
    of_ranks = [torch.cat([gradient.view(ranks, -1)[rank] for gradient in gradients]) for rank in range(ranks)]
    out.copy_(torch.stack(of_ranks))


def test_what_the_op_has_to_do() -> None:
    """Rows that ranks do not share equally, other dtypes, another dimension and other backends."""
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
    """The gradients of two layers after three backward passes, the second of which reduces nothing;
    and how often the op ran.
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
        for step in range(3):
            model.set_requires_gradient_sync(step != 1)
            model(models.batch(step, 64)).float().square().mean().backward()
    ops = sum(event.count for event in events.key_averages() if event.key == "aten::_chunk_cat")
    return [parameter.grad.full_tensor().cpu() for parameter in model.parameters()], ops


@pytest.mark.parametrize("wire", [None, "fp8_1x128"])
@pytest.mark.parametrize("reduce_dtype", [BF16, FP32])
@pytest.mark.parametrize("rows", [96, 95])
def test_gradients(ranks: Ranks, rows: int, reduce_dtype: torch.dtype, wire: str | None) -> None:
    """Equal bits over each wire, also where rows are left over and the op has to do it."""
    ours, of_op = (ranks(2)(gradients, rows, reduce_dtype, wire, by_op)[0] for by_op in (False, True))
    assert (ours[1], of_op[1]) == (0 if rows == 96 else 2, 2)
    assert list(map(torch.equal, ours[0], of_op[0])) == [True] * 4
