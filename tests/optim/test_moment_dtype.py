"""Checkpoints between optimizers that keep their moments in FP32 and in bf16: exact where alike, rounded once otherwise."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import casts
from tests.optim.probe import BF16, FP32
from tests.optim.runs import DETERMINISTIC, Run, Trainer, boxes, weight_bytes
from tests.selection import worlds
from zerocast import optim


def trainer_of(moment_dtype: torch.dtype) -> Trainer:
    """One that has taken no step."""
    return Trainer(Run(config=dataclasses.replace(DETERMINISTIC, moment_dtype=moment_dtype)))


def moments(trainer: Trainer) -> dict[str, Tensor]:
    """This rank's parts of all moments."""
    state = trainer.optimizer.state_dict()["optim"]["state"]
    fields = {f"{key} {name}": held[key] for name, held in state.items() for key in ("exp_avg", "exp_avg_sq")}
    return {f"{key} {where}": part.clone() for key, value in fields.items() for where, part in boxes(value)}


def through_files(path: str, saved: torch.dtype, loaded: torch.dtype) -> tuple[bool, bool]:
    """Save after three steps and load elsewhere; whether moments are those that were saved, and the next step too."""
    first, second = trainer_of(saved), trainer_of(loaded)
    first.train(range(3))
    optim.save(first.optimizer, path)
    second.step(0)
    optim.load(second.optimizer, path)
    theirs, mine = moments(first), moments(second)
    assert {part.dtype for part in mine.values()} == {loaded}
    assert all(torch.equal(part, theirs[name].to(loaded)) for name, part in mine.items())
    _assert_same(weight_bytes(second.probe), weight_bytes(first.probe))
    exact = all(torch.equal(part.float(), theirs[name].float()) for name, part in mine.items())
    second.scheduler.load_state_dict(first.scheduler.state_dict())
    first.step(3)
    second.step(3)
    after = zip(moments(first).values(), moments(second).values(), strict=True)
    return exact, all(torch.equal(a.to(b.dtype), b) for a, b in after)


def _assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, wanted in expected.items():
        casts.assert_same_bytes(found[name], wanted, name)


@pytest.mark.parametrize("world", worlds(2, slow=[1]))
@pytest.mark.parametrize(
    ("saved", "loaded", "exact"), [(BF16, BF16, True), (BF16, FP32, True), (FP32, FP32, True), (FP32, BF16, False)]
)
def test_either_loads_into_either(ranks, tmp_path, world, saved, loaded, exact):
    for unchanged, same_next_step in ranks(world)(through_files, str(tmp_path), saved, loaded):
        assert unchanged == exact
        assert same_next_step or saved is not loaded


def test_a_state_in_memory_loads_into_either():
    first, second = trainer_of(FP32), trainer_of(BF16)
    first.train(range(3))
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    wanted = moments(first)
    assert all(torch.equal(part, wanted[name].to(BF16)) for name, part in moments(second).items())
