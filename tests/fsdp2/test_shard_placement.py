"""Weights that `shard_placement_fn` shards along another dimension than the first: a rank casts its
slice, and what is gathered is the unsharded cast.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import DELAYED, EACH, Net, OfExperts, largest, slow
from tests.fsdp2.test_bits import check_steps
from tests.workers import error_of, on_ranks


def columns(parameter: Tensor) -> Shard | None:
    """Shard the columns of matrices and the elements of vectors."""
    return Shard(1) if parameter.dim() > 1 else None


def matrices(formats: tuple[str, ...], width: int, hidden: int, optimizer: str, options: dict[str, Any]) -> None:
    check_steps(Net(formats, width, hidden), width, optimizer, options)


@pytest.mark.shows(host="FSDP2", parallel="data", formats=EACH)
@pytest.mark.parametrize(
    ("world", "hidden", "optimizer", "keep_codes"),
    [
        (2, 256, "FusedAdamW", False),
        (3, 384, "AdamW", True),
        slow(2, 512, "8-bit moments", False),
        slow(4, 512, "FusedAdamW", False),
    ],
)
@on_ranks()
def test_every_format(hidden: int, optimizer: str, keep_codes: bool) -> None:
    """The first matrix of each block is cut by rows, the second one by columns, in one gather."""
    matrices(EACH, 64, hidden, optimizer, {"shard_placement_fn": largest, "keep_codes": keep_codes})


@on_ranks(3)
def test_columns_of_any_number() -> None:
    """Shards of 12 columns, and of 20, are no multiples of what a copy takes at once."""
    matrices(("fp8_current", DELAYED, "identity"), 60, 36, "FusedAdamW", {"shard_placement_fn": columns})


def experts(formats: tuple[str, ...], optimizer: str) -> None:
    """Check two experts, fewer than there are ranks, whose last block is smaller in some formats."""
    check_steps(
        OfExperts(formats, (2, 128 * dist.get_world_size(), 64)), 64, optimizer, {"shard_placement_fn": largest}
    )


@pytest.mark.shows(host="FSDP2", parallel="data", formats=EACH)
@pytest.mark.parametrize(
    ("world", "optimizer"), [(3, "FusedAdamW"), slow(2, "8-bit moments"), slow(4, "AdamW"), slow(4, "8-bit moments")]
)
@on_ranks()
def test_fewer_experts_than_ranks(optimizer: str) -> None:
    """Each rank has rows of every expert in one weight, and columns of every expert in the other."""
    experts(EACH, optimizer)


@on_ranks(2)
def test_switch() -> None:
    model = models.sharded(Net(("nvfp4", "fp8_current"), 64, 96), shard_placement_fn=columns)
    models.train(model, models.OPTIMIZERS["FusedAdamW"](model), range(1), 64)
    zerocast.switch(model, {"blocks.0.*.weight": "fp8_current", "blocks.1.*.weight": "nvfp4"})
    models.check(model, "switched")


def refusal(fmt: str, placement: Any, width: int) -> str:
    """Return the error of the first forward pass, which leaves the masters unchanged."""
    model = models.sharded(Net((fmt,), width, 96), shard_placement_fn=placement)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    said = error_of(lambda: model(models.batch(0, width)))
    now = [parameter.to_local() for parameter in models.held(model)]
    assert all(map(torch.equal, before, now))
    return said


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
@on_ranks(2)
def test_a_block_lies_in_one_slice(fmt: str, width: int, text: str) -> None:
    assert text in refusal(fmt, columns, width)


@on_ranks(2)
def test_ranks_agree_on_placements() -> None:
    """FSDP2 does not compare placements, and would gather what belongs nowhere."""
    assert "sharded along dimension 1" in refusal("nvfp4", second_on_rank_0, 96)
