"""Hooks of a step, of one optimizer and of all: each runs once, and none for an optimizer within another."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zerocast import ZeroAdamW, ZeroMuon
from zerocast.fsdp2 import FusedAdamW


def zero_muon(model: nn.Module) -> ZeroMuon:
    """Its vectors are updated by AdamW."""
    named = list(model.named_parameters())
    groups = [[(name, p) for name, p in named if (p.dim() == 2) is is_matrix] for is_matrix in (True, False)]
    return ZeroMuon([{"params": group, "use_muon": muon} for group, muon in zip(groups, (True, False), strict=True)])


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "ZeroAdamW": lambda model: ZeroAdamW(model.named_parameters()),
    "ZeroMuon": zero_muon,
    "FusedAdamW": lambda model: FusedAdamW(model.parameters()),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_each_runs_once_a_step(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    """Hooks before a step see the old values, those after it the new ones. A hook that was removed sees nothing."""
    model = nn.Linear(16, 16)
    optimizer = make(model)
    seen: list[tuple[str, object, bool]] = []
    before = model.weight.detach().clone()

    def note(when: str) -> Callable[..., None]:
        return lambda who, *_: seen.append((when, who, torch.equal(model.weight, before)))

    hooks: list[Any] = [
        register_optimizer_step_pre_hook(note("before any")),
        register_optimizer_step_post_hook(note("after any")),
        optimizer.register_step_pre_hook(note("before")),
        optimizer.register_step_post_hook(note("after")),
    ]
    try:
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
    finally:
        for hook in hooks:
            hook.remove()
    expected = [("before any", True), ("before", True), ("after", False), ("after any", False)]
    assert sorted((when, is_old) for when, _, is_old in seen) == sorted(expected)
    assert all(who is optimizer for _, who, _ in seen)
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    assert len(seen) == len(expected)
