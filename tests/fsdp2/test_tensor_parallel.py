"""FSDP2 over slices of tensor parallelism: each slice is its part of the unsharded cast, amax and all."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerocast
from tests import casts
from tests.fsdp2 import models
from tests.fsdp2.models import DELAYED, complaints_of_slices
from tests.observed import Traffic, logged
from tests.workers import Ranks, error_of, on_ranks
from zerocast.fsdp2.master_memory import MasterAddresses

WIDTH = 128


class MLP(nn.Module):
    """Two layers: `up` is sliced by rows, `down` by columns."""

    def __init__(self, hidden: int = 192, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def parallel(fmt: str, with_mesh: bool = True, hidden: int = 192, replicas: int = 1, width: int = WIDTH) -> nn.Module:
    """Return a model of two slices, each sharded over half of the ranks of a replica."""
    model = MLP(hidden, width).to(models.place())
    shape = replicas, dist.get_world_size() // 2 // replicas, 2
    mesh = models.mesh(shape, ("replicate", "dp", "tp"))
    flat = mesh["dp", "tp"]._flatten("all") if with_mesh else None
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    zerocast.fsdp2.prepare(model, zerocast.Recipe({"*.weight": fmt}), weight_mesh=flat)
    return fully_shard(model, mesh=mesh["replicate", "dp"] if replicas > 1 else mesh["dp"], mp_policy=models.BF16)


def slices(fmt: str, hidden: int, replicas: int = 1, width: int = WIDTH) -> Tensor:
    """Check the gathered slices at the start and after a step. Return the output of the model."""
    model = parallel(fmt, hidden=hidden, replicas=replicas, width=width)
    x = models.batch(0, width, rank=0)
    with torch.no_grad():
        y = model(x).cpu()
    assert complaints_of_slices(model, "start") == []
    model(x).float().square().mean().backward()
    optimizer = zerocast.fsdp2.FusedAdamW(model.parameters(), lr=0.1)
    assert all(p.grad is not None and p.grad.full_tensor().abs().max() > 0 for p in model.parameters())
    optimizer.step()
    assert complaints_of_slices(model, "after a step") == []
    return y


SLICED = [
    ("nvfp4", 192),
    ("nvfp4", 160),
    ("mxfp4", 256),
    ("mxfp8", 192),
    ("mxfp8:block=32x32", 192),
    ("fp8_block", 256),
    ("fp8_current", 192),
    (DELAYED, 192),
]


@pytest.mark.shows(
    host="FSDP2", parallel=lambda world: "tensor" if world == 2 else "data, tensor", formats=lambda fmt: [fmt]
)
@pytest.mark.parametrize(
    ("fmt", "hidden", "world"),
    [
        *((*case, 4 - number % 2 * 2) for number, case in enumerate(SLICED)),
        *(models.slow(*case, 2 + number % 2 * 2) for number, case in enumerate(SLICED)),
        ("nvfp4:exact_in_fp8", 192, 2),
    ],
)
def test_slices(ranks: Ranks, world: int, fmt: str, hidden: int) -> None:
    """One reduction carries the cut blocks of both slices: of 160 rows a slice has 80 and a rank of 4 has 40."""
    single = MLP(hidden)
    for layer in (single.up, single.down):
        value = casts.cast_whole(fmt, layer.weight.detach(), scale=1.0)
        if fmt != DELAYED:
            layer.weight.data = value.dequantize().float()
    for y in ranks(world)(slices, fmt, hidden):
        if fmt != DELAYED:
            expected = single(models.batch(0, WIDTH, rank=0)).float()
            assert (y.float() - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.shows(host="FSDP2", parallel="tensor, replicas", formats=lambda fmt: [fmt], ranks=4)
@pytest.mark.parametrize(("fmt", "hidden"), [SLICED[0], *(models.slow(*case) for case in SLICED[2:])])
@on_ranks(4)
def test_slices_in_replicas(fmt: str, hidden: int) -> None:
    """Amaxes are reduced over one replica's slices in hybrid sharding over tensor parallelism."""
    slices(fmt, hidden, replicas=2)


@on_ranks(2)
def test_a_slice_is_verified_by_the_amax_of_all() -> None:
    model = parallel("fp8_current")
    with torch.no_grad():
        if dist.get_rank() == 1:
            torch._foreach_mul_(list(model.parameters()), 3.0)
    zerocast.fsdp2.refresh(model)
    zerocast.verify(model).raise_for_differences()


@on_ranks(2)
def test_a_block_reaches_over_what_is_not_sliced() -> None:
    """A block has 128 columns of `up`, which has 64, in slices of 128 rows."""
    slices("fp8_block", 256, width=64)


@on_ranks(4)
def test_no_slice_goes_on_without_another() -> None:
    """A slice whose twin could not cast refuses too, since it would wait for it in its next collective."""
    model, x = parallel("nvfp4"), models.batch(0, WIDTH, rank=0)
    with torch.no_grad():
        model(x)
    manager = models.manager(model)
    manager.make_due()
    gone = mock.patch.object(MasterAddresses, "check_memory", side_effect=ValueError("their memory is gone"))
    with gone if dist.get_rank() == 1 else contextlib.nullcontext():
        refused = error_of(lambda: model(x))
    zerocast.fsdp2.refresh(model)
    master, _ = models.masters(model)["down.weight"]
    before = master.detach().clone()
    with torch.no_grad():
        if dist.get_rank() == 1:
            master.fill_(torch.nan)
        zerocast.fsdp2.refresh(model)
        not_finite = error_of(lambda: model(x))
        master.copy_(before)
    zerocast.fsdp2.refresh(model)
    assert complaints_of_slices(model, "put right") == []
    rank, of_slice = dist.get_rank(), "ranks [0] of its shard group could not cast"
    assert (of_slice if rank % 2 else "a rank of another slice of tensor parallelism, or") in refused
    assert ("their memory is gone" in refused) == (rank == 1)
    assert "NaN or Inf in the last cast: down.weight" in not_finite


@pytest.mark.parametrize("change", ["a step", "a write"])
@on_ranks(2)
def test_a_graph_of_slices_before_they_changed(change: str) -> None:
    """Autograd saves a slice as a DTensor, whose products are torch's."""
    model, x = parallel("nvfp4"), models.batch(0, WIDTH, rank=0).requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = model(x).float().square().mean()
    if change == "a step":
        model(x).float().square().mean().backward()
        optimizer.step()
    else:
        model.reshard()
        with torch.no_grad():
            torch._foreach_mul_([*model.parameters()], 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_ranks(2)
def test_slices_say_once_that_weight_gradients_are_nominal() -> None:
    model, x = parallel("fp8_current", hidden=512), models.batch(0, WIDTH, rank=0, rows=16)
    with zerocast.gemm.use("scaled_mm", weight_gradients="fp8"):
        with torch.no_grad():
            model(x)
        with logged("zerocast.gemm") as lines:
            for _ in range(2):
                model(x).float().square().mean().backward()
    assert [line.partition(" are nominal, ")[0] for line in lines] == [
        f"the weight gradients of {name}.weight" for name in ("up", "down")
    ]


@on_ranks(4)
def test_one_reduction_for_all_slices() -> None:
    """Without a cut (48 rows of `up` a rank and 64 of `down`) one reduction has two tensor amaxes, and a flag
    of each weight.
    """
    model = parallel("nvfp4")
    zerocast.fsdp2.refresh(model)
    with Traffic() as seen:
        zerocast.fsdp2.refresh(model)
    assert seen.sent["all-reduce"] == [8]


@pytest.mark.parametrize(("fmt", "text"), [("nvfp4", "pass prepare(..., weight_mesh=)"), ("mxfp8", "")])
@on_ranks(2)
def test_amax_of_slices_needs_a_mesh(fmt: str, text: str) -> None:
    said = error_of(lambda: parallel(fmt, with_mesh=False)(models.batch(0, WIDTH, rank=0)))
    assert text in said
    assert bool(text) == bool(said)


@pytest.mark.parametrize(
    ("fmt", "hidden", "text"),
    [
        ("fp8_block", 192, "a block of fp8_block would span two tensor-parallel slices"),
        (
            "mxfp4",
            192,
            "a block of mxfp4 would span two tensor-parallel slices: one is [96, 128] and a block [128, 128]",
        ),
        ("mxfp8:block=32x32", 96, "mxfp8:block=32x32 needs rows that are a multiple of 32, got 48"),
    ],
)
@on_ranks(2)
def test_a_block_lies_in_one_slice(fmt: str, hidden: int, text: str) -> None:
    assert text in error_of(lambda: parallel(fmt, hidden=hidden)(models.batch(0, WIDTH, rank=0)))
