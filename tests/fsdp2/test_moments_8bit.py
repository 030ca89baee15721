"""FusedAdamW with moments in 8 bits: its launches, and states that go on. The bits of ZeroAdamW: test_fused_adamw.py."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from tests.fsdp2 import models
from tests.fsdp2.models import EACH, FEW, Net, digests
from tests.fsdp2.test_fused_adamw import put_gradients
from tests.observed import Dispatched
from tests.optim.runs import ADAM
from tests.workers import error_of, on_ranks
from zerocast.fsdp2 import FusedAdamW, TrainingState
from zerocast.fsdp2.moments_8bit import ShardedMoments

# Rows of 200 elements, and vectors of 200 and 96, which ranks cut within a group of 128.
WIDTH, HIDDEN = 200, 96
PLAIN = {"*.weight": "identity"}


def fused(model: nn.Module, **options: Any) -> FusedAdamW:
    return FusedAdamW(model.named_parameters(), **{**ADAM, "moment_dtype": "8bit", **options})


def train(model: nn.Module, optimizer: FusedAdamW, steps: range) -> dict[str, str]:
    """Step by given gradients. Return the digests of masters and moments."""
    for step in steps:
        put_gradients(model, step)
        optimizer.step()
    return state_of(model, optimizer)


def state_of(model: nn.Module, optimizer: FusedAdamW) -> dict[str, str]:
    """Return the digests of masters, moments and step counts."""
    state = TrainingState(model, optimizer).state_dict()
    return digests({"model": state["model"], "optim": state["optim"]})


def launches(moment_dtype: Any) -> Counter[str]:
    """Count the launches of each stage in a step, under the names that FP32 moments have."""
    model = models.sharded(Net(EACH, 64, HIDDEN), keep_codes=True)
    optimizer = fused(model, moment_dtype=moment_dtype)
    train(model, optimizer, range(2))
    put_gradients(model, 2)
    with Dispatched() as operators:
        optimizer.step()
    return Counter(stage.replace("8bit", "amax").replace("amax_cast", "cast") for stage in operators.stages)


@on_ranks(1)
def test_a_step_has_the_launches_of_fp32_moments() -> None:
    """A step has one launch for each format, not for each parameter, and codes are written with it."""
    found = launches("8bit")
    assert found == launches(torch.float32)
    assert found["adam_cast"] > 1


def plain_model(**options: Any) -> Any:
    """Return a model without formats, whose blocks the width would not fit."""
    return models.sharded(Net(FEW, WIDTH, HIDDEN), PLAIN, **options)


def trained_on_the_host() -> None:
    """Check that masters in CPU memory change nothing after some steps."""
    states = []
    for options in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        model = plain_model(**options)
        optimizer = fused(model)
        models.train(model, optimizer, range(3), WIDTH)
        # Shards, since NCCL alone does not gather masters of a CPU.
        state = TrainingState(model, optimizer).state_dict()
        shards = tree_map_only(DTensor, DTensor.to_local, {"model": state["model"], "optim": state["optim"]})
        states.append(digests(shards))
    assert states[0] == states[1]


@on_ranks(2)
def test_a_load_that_raises_half_way_is_told() -> None:
    model = plain_model()
    optimizer = fused(model)
    before = train(model, optimizer, range(2))
    whole, state = TrainingState(model, optimizer).state_dict(), optimizer.state_dict()
    with mock.patch.object(ShardedMoments, "reduce", side_effect=MemoryError("out of it")):
        told = [error_of(lambda: optimizer.load_state_dict(state))]
    told += [error_of(call) for call in (optimizer.state_dict, optimizer.step)]
    TrainingState(model, optimizer).load_state_dict(whole)
    assert state_of(model, optimizer) == before
    assert "out of it" in told[0]
    assert all("a load failed partway" in text for text in told[1:])


def test_states_of_fp32_moments() -> None:
    """States of torch.optim.AdamW and FusedAdamW load, rounded once. FP32 moments take 8-bit ones as they are."""
    kinds: list[Callable[..., Any]] = [torch.optim.AdamW, FusedAdamW]
    for kind in kinds:
        model = nn.Linear(200, 7)
        exact, rounded = kind(model.parameters()), fused(model)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        exact.step()
        rounded.load_state_dict(exact.state_dict())
        again = rounded.state_dict()
        for index, moments in again["state"].items():
            wanted = exact.state_dict()["state"][index]
            assert float(moments["step"]) == 1
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.allclose(moments[key], wanted[key], atol=float(wanted[key].abs().max()) / 50)
        exact.load_state_dict(again)
        assert digests(exact.state_dict()["state"]) == digests(again["state"])


def test_what_it_refuses() -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="or '8bit', got"):
        fused(model, moment_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="pass FusedAdamW model"):
        FusedAdamW(model.parameters(), moment_dtype="8bit")
    optimizer = fused(model)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    optimizer.state[model.bias]["exp_avg"] = torch.zeros(8)
    with pytest.raises(RuntimeError, match="exp_avg of an optimizer with moments in 8 bits was replaced"):
        optimizer.step()
