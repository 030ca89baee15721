"""Checkpoints between optimizers that keep their moments in FP32, bf16 and 8 bits: exact where alike, rounded once otherwise."""

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests import casts
from tests.optim.probe import BF16, FP32, PLAIN, Spec
from tests.optim.runs import ADAM, DETERMINISTIC, EIGHT_BIT_MOMENTS, Run, Trainer, refused, snapshot
from tests.workers import error_of, on_ranks
from zerocast import optim

# Weights whose groups of moments are cut by any number of ranks: rows of 200 and 40 elements.
CUT = (Spec("wide", (24, 200), dtype=BF16), Spec("codes", (32, 48), "nvfp4"), Spec("vector", (1000,), dtype=FP32))
EIGHT_BITS = Run(specs=CUT, options=(ADAM,), config=EIGHT_BIT_MOMENTS, assign=True)

COMPACT = dataclasses.replace(EIGHT_BITS, config=dataclasses.replace(EIGHT_BIT_MOMENTS, state="compact"))


def whole_state(path: str) -> dict[str, Any]:
    """Return the state that one process loads."""
    trainer = Trainer(EIGHT_BITS)
    optim.load(trainer.optimizer, path)
    return snapshot(trainer)


@on_ranks(3)
def test_moments_in_8_bits_are_cut():
    """Every rank of the runs below has groups that another rank has a part of."""
    count = len(Trainer(EIGHT_BITS).optimizer._masters.eight_bit.cut_groups)
    assert count > 0


def saved_both_ways(path: str) -> None:
    """Save two equal runs, one with moments in FP32 and one with codes."""
    for name, run in (("exact", EIGHT_BITS), ("compact", COMPACT)):
        trainer = Trainer(run)
        trainer.train(range(3))
        optim.save(trainer.optimizer, f"{path}/{name}")


def test_a_compact_state_is_the_same_state(ranks, tmp_path):
    """A compact state has 2.06 bytes an element of moments. Either kind of checkpoint loads into either optimizer."""
    ranks(3)(saved_both_ways, str(tmp_path))
    expected = whole_state(str(tmp_path / "exact"))
    casts.assert_same_bytes(whole_state(str(tmp_path / "compact")), expected)
    trainer = Trainer(COMPACT)
    optim.load(trainer.optimizer, tmp_path / "exact")
    other = Trainer(EIGHT_BITS)
    other.optimizer.load_state_dict(trainer.optimizer.state_dict())
    casts.assert_same_bytes(snapshot(other), expected)
    numel = sum(parameter.numel() for parameter in trainer.probe.parameters())
    held = trainer.optimizer.state_dict()["optim"]["state"].values()
    nbytes = sum(tensor.nbytes for moments in held for key, tensor in moments.items() if key != "step")
    assert 2.06 * numel < nbytes < 2.2 * numel, "rows of 200 and 48 elements have shorter groups"


def test_a_compact_state_that_does_not_fit(tmp_path):
    trainer = Trainer(COMPACT)
    trainer.step(0)
    optim.save(trainer.optimizer, tmp_path / "it")
    with pytest.raises(ValueError, match=r"exp_avg is torch\.int8 in the checkpoint, expected torch\.float32"):
        optim.load(Trainer(dataclasses.replace(EIGHT_BITS, config=DETERMINISTIC)).optimizer, tmp_path / "it")
    state = trainer.optimizer.state_dict()
    held = state["optim"]["state"]["wide"]
    for dtype in (torch.int32, torch.uint8, torch.float32):
        # as another writer of checkpoints might have stored codes
        others = {**state["optim"]["state"], "wide": {**held, "exp_avg": held["exp_avg"].to(dtype)}}
        dcp.save({**state, "optim": {**state["optim"], "state": others}}, checkpoint_id=tmp_path / str(dtype))
        with pytest.raises(ValueError, match=rf"exp_avg is {dtype} in the checkpoint, expected torch\.int8"):
            optim.load(trainer.optimizer, tmp_path / str(dtype))
    changed = {
        r"scales \(24, 4\) of groups of moments in the state and \(24, 2\) in the optimizer": {
            "exp_avg_scale": torch.ones(24, 4)
        },
        "holds -1.0 in the state, but scales are not negative": {"exp_avg_scale": torch.full((24, 2), -1.0)},
        "holds NaN or Inf": {"exp_avg_scale": torch.full((24, 2), torch.nan)},
        "exp_avg of wide holds -128 in the state, but codes are": {
            "exp_avg": torch.full((24, 200), -128, dtype=torch.int8)
        },
        r"torch\.int32 in the state and torch\.int8 in the optimizer": {
            "exp_avg": torch.full((24, 200), 300, dtype=torch.int32)
        },
        r"torch\.int8 in the state and torch\.uint8 in the optimizer": {
            "exp_avg_sq": torch.ones(24, 200, dtype=torch.int8)
        },
    }
    of_another_size = {**state["optim"]["state"], "wide": {**held, "exp_avg_scale": torch.ones(24, 4)}}
    dcp.save({**state, "optim": {**state["optim"], "state": of_another_size}}, checkpoint_id=tmp_path / "groups of 64")
    with pytest.raises(ValueError, match=r"\(24, 4\) in the checkpoint, expected \(24, 2\)"):
        optim.load(trainer.optimizer, tmp_path / "groups of 64")
    for said, replaced in changed.items():
        broken = {**state["optim"]["state"], "wide": {**held, **replaced}}
        whole = {**state, "optim": {**state["optim"], "state": broken}}
        assert re.search(said, refused(trainer, functools.partial(trainer.optimizer.load_state_dict, whole)))
    with pytest.raises(ValueError, match="or 'compact' with moments in 8 bits"):
        dataclasses.replace(DETERMINISTIC, state="compact")


@on_ranks(2)
def test_ranks_load_one_kind_of_moments():
    exact, compact = Trainer(EIGHT_BITS), Trainer(COMPACT)
    exact.step(0)
    source = exact if dist.get_rank() == 0 else compact
    assert "moments as codes" in refused(
        compact, lambda: compact.optimizer.load_state_dict(source.optimizer.state_dict())
    )


@pytest.mark.parametrize("late", [False, True])
@on_ranks(2)
def test_a_rank_that_refuses_a_step_keeps_no_other_waiting(late):
    """Rank 1 refuses a step, and no weight is cast. Once a state is loaded, all is as without that step. If
    `late`, others hear of the problem after the step, as on a GPU.
    """
    run = dataclasses.replace(EIGHT_BITS, specs=tuple(spec for spec in CUT if spec.fmt == PLAIN))
    trainer, whole = Trainer(run), Trainer(run)
    trainer.optimizer._weights.driver.plan.amaxes.reports.reads_late = late
    for each in (trainer, whole):
        each.step(0)
    (group,) = trainer.optimizer.param_groups
    group["lr"] = -1.0 if trainer.rank == 1 else group["lr"]
    told = [error_of(lambda: trainer.step(1)), error_of(trainer.optimizer.state_dict)]
    trainer.optimizer.zero_grad()
    trainer.optimizer.load_state_dict(whole.optimizer.state_dict())
    for each in (trainer, whole):
        each.step(3)
    casts.assert_same_bytes(snapshot(trainer), snapshot(whole))
    is_told_later = late and trainer.rank == 0
    assert bool(told[0]) != is_told_later
    assert "lr is out of range: -1.0" in told[is_told_later]


def test_a_state_of_torchs_adamw_loads_into_8_bits():
    """Moments of torch's AdamW are rounded, and zeros stay zeros."""
    trainer = Trainer(Run(config=EIGHT_BIT_MOMENTS))
    twins = {name: torch.nn.Parameter(value.clone()) for name, value in trainer.optimizer.state_dict()["model"].items()}
    adamw = torch.optim.AdamW(twins.values())
    for name, twin in twins.items():
        twin.grad = twin.detach() * len(name)
    adamw.step()
    state = {name: adamw.state[twin] for name, twin in twins.items()}
    trainer.optimizer.load_state_dict({"model": {n: t.detach() for n, t in twins.items()}, "optim": {"state": state}})
    held = trainer.optimizer.state_dict()["optim"]["state"]
    for name, wanted in state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(held[name][key], wanted[key], atol=float(wanted[key].abs().max()) / 50)
        assert torch.equal(held[name]["exp_avg_sq"] > 0, wanted["exp_avg_sq"] > 0)
