"""Gathered weights have an owner, their master: no step of anybody takes them for weights that nobody trains."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.fsdp2.models import Net, batch, manager, sharded, train
from tests.workers import Ranks, error_of

# gradients then stay on the gathered weights
PLAIN = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def others_step_between() -> None:
    """Gradients stay on gathered weights while another optimizer steps."""
    model, head = (
        sharded(Net(("nvfp4", "mxfp8"), 64, 128), reshard_after_forward=False, mp_policy=PLAIN),
        nn.Linear(64, 64),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.optim.SGD(head.parameters(), lr=0.1)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    for step in range(2):
        head(model(batch(step, 64)).float()).square().mean().backward()
        other.step()
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    train(model, optimizer, range(2, 4), 64)


def test_gathered_weights_have_an_owner(ranks: Ranks) -> None:
    ranks(2)(others_step_between)


def messages_of_steps(kind: str) -> list[str]:
    """What three steps warn of or raise, with an optimizer over a part of the model, or over a parameter twice."""
    model = sharded(Net(("nvfp4", "mxfp8"), 64, 128))
    named = dict(model.named_parameters())
    first = named[manager(model).weights[0].name]
    others = [parameter for parameter in named.values() if parameter is not first]
    optimizer = torch.optim.AdamW(others if kind != "all" else [first, *others])
    if kind == "twice":
        optimizer.param_groups[0]["params"].append(others[0])
    optimizers = [optimizer, torch.optim.SGD([first], lr=0.1)] if kind == "two optimizers" else [optimizer]
    if kind == "frozen":
        first.requires_grad_(False)
    said: list[str] = []
    for step in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(batch(step, 64)).float().square().mean().backward()
            for each in optimizers:
                said += [error for error in [error_of(each.step)] if error]
            model.zero_grad()
        said += [str(warning.message) for warning in caught if "prepared weights" in str(warning.message)]
    return said


@pytest.mark.parametrize(
    ("kind", "message", "count"),
    [
        ("all", "", 0),
        ("two optimizers", "", 0),
        ("frozen", "", 0),
        ("a part", "1 prepared weights have gradients, and no optimizer", 1),
        ("twice", "RuntimeError: this AdamW lists", 3),
    ],
)
def test_weights_that_nobody_trains_or_that_are_trained_twice(
    ranks: Ranks, kind: str, message: str, count: int
) -> None:
    for said in ranks(2)(messages_of_steps, kind):
        assert len(said) == count, said
        assert all(one.startswith(message) for one in said), said
