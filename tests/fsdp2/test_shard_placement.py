"""Weights that `shard_placement_fn` shards along another dimension than the first: a rank casts its
slice, and what is gathered is the unsharded cast.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import DELAYED, FORMATS, Net, OfExperts, largest, slow
from tests.workers import Ranks, error_of, on_ranks
from zerocast.fsdp2 import FusedAdamW

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def columns(parameter: Tensor) -> Shard | None:
    """Columns of matrices, elements of vectors."""
    return Shard(1) if parameter.dim() > 1 else None


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return FusedAdamW(model.parameters(), lr=1e-2)


def in_8bit(model: nn.Module) -> torch.optim.Optimizer:
    return models.with_8bit_moments(model, lr=1e-2)


def trained(net: Any, width: int, optimizer: Optimizer, options: dict[str, Any]) -> list[str]:
    """What is wrong at the start and after each of two steps."""
    model = models.sharded(net, **options)
    stepped = optimizer(model)
    found = models.complaints(model, "at the start")
    for step in range(2):
        models.train(model, stepped, range(step, step + 1), width)
        found += models.complaints(model, f"after step {step}")
        found += [str(difference) for difference in zerocast.verify(model).differences]
    return found


def matrices(
    formats: tuple[str, ...], width: int, hidden: int, optimizer: Optimizer, options: dict[str, Any]
) -> list[str]:
    return trained(Net(formats, width, hidden), width, optimizer, options)


@pytest.mark.shows(host="FSDP2", parallel="data", formats=FORMATS)
@pytest.mark.parametrize(
    ("world", "hidden", "optimizer", "keep_codes"),
    [(4, 512, fused, False), (3, 384, adamw, True), slow(2, 512, in_8bit, False), slow(1, 384, fused, True)],
)
def test_every_format(ranks: Ranks, world: int, hidden: int, optimizer: Optimizer, keep_codes: bool) -> None:
    """The first matrix of each block is cut by rows, the second one by columns, in one gather."""
    options = {"shard_placement_fn": largest, "keep_codes": keep_codes}
    assert ranks(world)(matrices, FORMATS, 64, hidden, optimizer, options) == [[]] * world


def test_columns_of_any_number(ranks: Ranks) -> None:
    """Slices of 12 columns, and 20: no multiples of what a copy takes at once."""
    formats = "fp8_current", DELAYED, "identity"
    assert ranks(3)(matrices, formats, 60, 36, fused, {"shard_placement_fn": columns}) == [[]] * 3


def experts(formats: tuple[str, ...], optimizer: Optimizer) -> list[str]:
    """Two experts, fewer than there are ranks, whose last block is smaller in some formats."""
    return trained(OfExperts(formats, (2, 512, 96)), 96, optimizer, {"shard_placement_fn": largest})


@pytest.mark.shows(host="FSDP2", parallel="data", formats=FORMATS)
@pytest.mark.parametrize(("world", "optimizer"), [(4, fused), slow(2, in_8bit), slow(4, adamw), slow(4, in_8bit)])
def test_fewer_experts_than_ranks(ranks: Ranks, world: int, optimizer: Optimizer) -> None:
    """Rows of every expert on each rank, and columns of every expert."""
    assert ranks(world)(experts, FORMATS, optimizer) == [[]] * world


@on_ranks(2)
def test_switch() -> None:
    model = models.sharded(Net(("nvfp4", "fp8_current"), 64, 96), shard_placement_fn=columns)
    models.train(model, fused(model), range(1), 64)
    zerocast.switch(model, {"blocks.0.*.weight": "fp8_current", "blocks.1.*.weight": "nvfp4"})
    assert models.complaints(model, "switched") == []


def refusal(fmt: str, placement: Any, width: int) -> str:
    """What the first forward pass says, and whether the masters are what they were."""
    model = models.sharded(Net((fmt,), width, 96), shard_placement_fn=placement)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    said = error_of(lambda: model(models.batch(0, width)))
    now = [parameter.to_local() for parameter in models.held(model)]
    return said if all(map(torch.equal, before, now)) else f"changed before: {said}"


def second_on_rank_0(parameter: Tensor) -> Shard | None:
    return columns(parameter) if dist.get_rank() == 0 else None


@pytest.mark.parametrize(
    ("fmt", "width", "text"),
    [
        (
            "fp8_block",
            128,
            "a block of fp8_block would span two shards of Shard(1): one is [96, 64] and a block [128, 128]",
        ),
        ("nvfp4", 48, "nvfp4 needs columns that are a multiple of 16, got 24 in shape (96, 24)"),
    ],
)
def test_a_block_lies_in_one_slice(ranks: Ranks, fmt: str, width: int, text: str) -> None:
    for said in ranks(2)(refusal, fmt, columns, width):
        assert text in said, said
        assert not said.startswith("changed")


def test_ranks_agree_on_placements(ranks: Ranks) -> None:
    """FSDP2 does not compare them, and would gather what belongs nowhere."""
    for said in ranks(2)(refusal, "nvfp4", second_on_rank_0, 96):
        assert "sharded along dimension 1" in said, said
