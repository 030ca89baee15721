"""Gathered weights have an owner, their master: no step of anybody takes them for weights that nobody trains."""

import warnings

import pytest
import torch

from tests.fsdp2.models import Net, batch, manager, sharded
from tests.workers import error_of, on_ranks


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
@on_ranks(2)
def test_weights_that_nobody_trains_or_that_are_trained_twice(kind: str, message: str, count: int) -> None:
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
    assert len(said) == count, said
    assert all(one.startswith(message) for one in said), said
