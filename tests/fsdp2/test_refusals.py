"""Models and settings that cannot work are refused on every rank, with an error that says what to do."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import Net
from tests.workers import error_of, on_ranks
from zerocast import Recipe
from zerocast.fsdp2 import prepare

NVFP4 = Recipe({"*weight": "nvfp4"})


def linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    """Return a layer that nvfp4 takes."""
    return nn.Linear(32, 32, bias=False, dtype=dtype)


def twice(model: nn.Module) -> nn.Module:
    return prepare(prepare(model, NVFP4), NVFP4)


def tied() -> nn.Module:
    """Return a model with one weight under two names."""
    model = nn.Sequential(linear(), linear())
    model[1].weight = model[0].weight
    return model


AT_ONCE: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "misspelt pattern": (ValueError, "matches no weight", lambda: prepare(linear(), Recipe({"wieght": "nvfp4"}))),
    "shape": (ValueError, "weight: nvfp4 needs rows", lambda: prepare(nn.Linear(32, 8), NVFP4)),
    "embedding": (ValueError, "embedding", lambda: prepare(nn.Embedding(32, 32), NVFP4)),
    "bf16 master": (
        TypeError,
        "pass fully_shard a MixedPrecisionPolicy",
        lambda: prepare(linear(torch.bfloat16), NVFP4),
    ),
    "twice": (ValueError, "prepared already", lambda: twice(linear())),
    "two formats": (
        ValueError,
        "match two formats",
        lambda: prepare(tied(), Recipe({"0.weight": "nvfp4", "1.weight": "mxfp8"})),
    ),
    "refresh of another model": (ValueError, "was not given to", lambda: zerocast.fsdp2.refresh(linear())),
}


@pytest.mark.parametrize("case", AT_ONCE)
def test_refused_at_once(case: str) -> None:
    error, text, call = AT_ONCE[case]
    with pytest.raises(error, match=text):
        call()


def test_a_refusal_changes_nothing() -> None:
    model = nn.Sequential(linear(), nn.Linear(32, 8))
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"1\.weight"):
        prepare(model, NVFP4)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def after_sharding() -> None:
    model = Net(("nvfp4",), 64, 96)
    models.sharded(model, prepare=False)
    prepare(model, Recipe(model.recipe))


def other_nominal() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float64)
    models.sharded(Net(("nvfp4",), 64, 96), mp_policy=policy)(models.batch(0, 64).double())


def cast_later(dtype: torch.dtype, steps: int) -> None:
    model = models.sharded(Net(("nvfp4",), 64, 96))
    models.train(model, torch.optim.SGD(model.parameters(), lr=1e-3), range(steps), 64)
    model.to(dtype)(models.batch(0, 64))


def not_sharded() -> None:
    model = Net(("nvfp4",), 64, 96)
    prepare(model, Recipe(model.recipe))
    fully_shard(model.blocks[0][1], mesh=models.mesh())
    model(models.batch(0, 64))


def mixed_nominal() -> None:
    """Shard a model with a bias of another dtype than its weight's master."""
    model = Net(("nvfp4",), 64, 96)
    model.blocks[0][1].bias.data = model.blocks[0][1].bias.data.bfloat16()
    models.sharded(model)


def replaced(place: int) -> None:
    """Replace a master by a plain tensor between two gathers. The second asks only the first weight of a group."""
    model = models.sharded(Net(("nvfp4",), 64, 96), reshard_after_forward=True)
    model(models.batch(0, 64))
    (group,) = models.manager(model).plan.param_groups.prepared
    param = group.weights[place].param()
    master = param.sharded_param
    plain = DTensor.from_local(master.to_local().plain.clone(), master.device_mesh, master.placements)
    param.sharded_param = nn.Parameter(plain)
    model(models.batch(1, 64))


def tied_later() -> None:
    model = Net(("nvfp4",) * 2, 64, 96)
    prepare(model, Recipe(model.recipe))
    model.blocks[1][1].weight = model.blocks[0][1].weight
    fully_shard(model, mesh=models.mesh())
    model(models.batch(0, 64))


def reduced_over_replicas() -> None:
    mesh = models.mesh((2, 2), ("replicate", "shard"))
    model = models.sharded(Net(("nvfp4",), 64, 96), mesh=mesh, prepared={"weight_mesh": mesh["replicate"]})
    model(models.batch(0, 64))


def unequal_recipes() -> None:
    fmt = ("nvfp4", "fp8_current")[torch.distributed.get_rank() % 2]
    models.sharded(Net((fmt,), 64, 96))(models.batch(0, 64))


ON_RANKS: dict[str, tuple[Callable[[], None], str]] = {
    "after sharding": (after_sharding, "call zerocast.fsdp2.prepare before fully_shard"),
    "resharding to a smaller mesh": (
        lambda: models.sharded(Net(("nvfp4",), 64, 96), reshard_after_forward=2)(models.batch(0, 64)),
        "reshard_after_forward=<int> does not work with quantized weights",
    ),
    "nominal dtype": (other_nominal, "not in torch.float64"),
    "model.to(bf16)": (partial(cast_later, torch.bfloat16, 0), "masters are float32, this is torch.bfloat16"),
    "model.to(fp16) after steps": (
        partial(cast_later, torch.float16, 1),
        "blocks.0.1.weight: masters are float32, this is torch.float16",
    ),
    "mixed nominal dtypes": (mixed_nominal, "make both float32 and leave precision to its MixedPrecisionPolicy"),
    "not sharded": (not_sharded, "no FSDP module inside the prepared model manages it"),
    "the first master replaced": (partial(replaced, 0), "blocks.0.1.weight: something replaced the prepared parameter"),
    "another master replaced": (partial(replaced, 1), "blocks.0.3.weight: something replaced the prepared parameter"),
    "tied after prepare": (tied_later, "blocks.1.1.weight is prepared, and another parameter is in its place"),
    "amaxes of other ranks": (reduced_over_replicas, "FSDP2 shards the weight over ranks [0, 1], and weight_mesh has"),
    "a mesh of two dimensions": (
        lambda: prepare(linear(), NVFP4, weight_mesh=models.mesh((2, 2), ("replicate", "shard"))),
        "weight_mesh has one dimension, got 2",
    ),
    "unequal recipes": (unequal_recipes, "on rank 0 and"),
}


@pytest.mark.parametrize("case", ON_RANKS)
@on_ranks(4)
def test_refused_on_every_rank(case: str) -> None:
    call, said = ON_RANKS[case]
    assert said in error_of(call)
