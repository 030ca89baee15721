"""Checkpoints: what is loaded is what was saved, and what follows is what would have followed, to the bit."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests import casts
from tests.optim.probe import BF16, FP32, MIXED, Spec
from tests.optim.runs import Run, Trainer, assert_equals, boxes, snapshot
from tests.optim.undistributed import F32, Undistributed
from tests.selection import some, worlds
from zerocast import ZeroConfig, optim

LIBRARY_ORDER = ZeroConfig(bucket_size=4096)
OVERLAP = ZeroConfig(bucket_size=4096, deterministic=True, overlap_all_gather=True)
RUNS = {
    "clip and schedule": Run(steps=20, schedule=True, max_norm=0.1),
    "overlap": Run(steps=20, config=OVERLAP),
    "library order": Run(steps=20, config=LIBRARY_ORDER, max_norm=0.1),
    "stage 1": Run(steps=20, stage=1, accumulate=2),
}


def with_dcp_save(trainer: Trainer, path: str) -> None:
    """torch.distributed.checkpoint by hand."""
    dcp.save(trainer.optimizer.state_dict(), checkpoint_id=path)


def with_dcp_load(trainer: Trainer, path: str) -> None:
    """In place, then taken over."""
    state = trainer.optimizer.state_dict()
    dcp.load(state, checkpoint_id=path)
    trainer.optimizer.load_state_dict(state)


def train(trainer: Trainer, steps: range) -> None:
    """Some steps."""
    for step in steps:
        trainer.step(step)


def interrupted(run: Run, path: str, by_hand: bool) -> None:
    """20 steps, and 10 + save + load + 10 in a new optimizer."""
    save: Callable[[Trainer, str], None] = with_dcp_save if by_hand else lambda t, p: optim.save(t.optimizer, p)
    load: Callable[[Trainer, str], None] = with_dcp_load if by_hand else lambda t, p: optim.load(t.optimizer, p)
    whole, first, second = Trainer(run), Trainer(run), Trainer(run)
    train(whole, range(run.steps))
    half = run.steps // 2
    train(first, range(half))
    save(first, path)
    schedule = first.scheduler.state_dict()
    wanted = snapshot(first)
    train(second, range(3))  # whatever it was before
    second.scheduler.load_state_dict(schedule)
    load(second, path)
    casts.assert_same_bytes(snapshot(second), wanted, f"rank {whole.rank}, loaded")
    train(second, range(half, run.steps))
    casts.assert_same_bytes(snapshot(second), snapshot(whole), f"rank {whole.rank}, 20 steps")


@pytest.mark.parametrize("world", worlds(2, slow=(1, 3)))
@pytest.mark.parametrize("run", some(RUNS, "clip and schedule", "library order"))
def test_resume_is_exact(ranks, tmp_path, world, run):
    by_hand = world == 2  # torch.distributed.checkpoint, else `optim.save` and `optim.load`
    ranks(world)(interrupted, run, str(tmp_path / "checkpoint"), by_hand)


def test_resume_is_exact_without_a_process_group(tmp_path):
    interrupted(RUNS["clip and schedule"], str(tmp_path / "checkpoint"), by_hand=False)


RESHARDED = tuple(dataclasses.replace(spec, used="always") for spec in MIXED)


def injected(step: int) -> dict[str, F32]:
    """The same reduced gradient on any number of ranks: a mean of equal bf16 values is exact."""
    return {s.name: s.gradient(step, 0).to(BF16).float().numpy() for s in RESHARDED}  # type: ignore[union-attr]


def hop(config: ZeroConfig, steps: range, source: str | None, target: str, device: str = "cpu") -> None:
    """Load, compare, take one step with an injected gradient for each of `steps`, compare, save."""
    trainer, reference = Trainer(Run(RESHARDED, config=config, device=device)), Undistributed(RESHARDED)
    for step in range(steps.start):
        reference.step({name: [g] for name, g in injected(step).items()}, trainer.run.options)
    if source is not None:
        optim.load(trainer.optimizer, source)
        assert_equals(trainer, reference, f"rank {trainer.rank} of {dist.get_world_size()}, loaded")
    for step in steps:
        for name, gradient in injected(step).items():
            parameter = trainer.probe.get_parameter(name)
            dtype = parameter.grad_dtype or parameter.dtype
            parameter.grad = torch.from_numpy(gradient).to(device, dtype)
        trainer.optimizer.step()
        reference.step({name: [g] for name, g in injected(step).items()}, trainer.run.options)
        assert_equals(trainer, reference, f"rank {trainer.rank} of {dist.get_world_size()}, step {step}")
    optim.save(trainer.optimizer, target)


@pytest.mark.parametrize("worlds", [(4, 2, 3), (1, 3), (2, 1), (3, 4, 1)], ids=str)
def test_other_numbers_of_ranks(ranks, tmp_path, worlds):
    """4 -> 2 -> 3: loaded masters, moments, step, history and bytes are equal, and so is a step from there."""
    source = None
    for index, world in enumerate(worlds):
        target = str(tmp_path / f"checkpoint {index}")
        config = ZeroConfig(bucket_size=(4096, 1, 10_000)[index], deterministic=True)  # how it is cut does not matter
        ranks(world)(hop, config, range(3 * index, 3 * index + 3), source, target)
        source = target


LARGE = (
    Spec("a", (128, 256), "nvfp4"),
    Spec("b", (256, 128), "fp8_delayed:amax_history_len=4"),
    Spec("c", (128, 128), dtype=FP32),
)


def held_by_the_state(path: str) -> tuple[int, int]:
    """(bytes that the state dictionary of a rank refers to, bytes of the largest tensor in a rank's files)."""
    trainer = Trainer(Run(LARGE, config=ZeroConfig(bucket_size=2**14)))
    state = trainer.optimizer.state_dict()
    parts = [part for _, value in _leaves(state) for _, part in boxes(value)]
    optim.save(trainer.optimizer, path)
    return sum(part.nbytes for part in parts), max(part.nbytes for part in parts)


def _leaves(state: Any, prefix: str = "") -> list[tuple[str, Tensor]]:
    if not isinstance(state, dict):
        return [(prefix[1:], state)]
    return [leaf for key, value in state.items() for leaf in _leaves(value, f"{prefix}.{key}")]


@pytest.mark.parametrize("world", [2, 4])
def test_no_rank_holds_the_full_state(ranks, tmp_path, world):
    numel = 2 * 128 * 256 + 128 * 128
    for total, largest in ranks(world)(held_by_the_state, str(tmp_path / "checkpoint")):
        assert total <= 12 * numel / world + 1024
        assert largest <= 4 * 128 * 256 / 2
    files = [file.stat().st_size for file in (tmp_path / "checkpoint").glob("*.distcp")]
    assert len(files) == world
    assert max(files) <= 1.3 * sum(files) / world


def staged(path: str) -> None:
    """An asynchronous save writes the state of the moment that it was called, with steps going on meanwhile."""
    trainer, other = Trainer(Run()), Trainer(Run())
    train(trainer, range(2))
    wanted = snapshot(trainer)
    group = dist.new_group(backend="gloo")
    writer = _Slow(path)
    stager = dcp.staging.DefaultStager(dcp.staging.StagingOptions(False, False, False, False))
    state = trainer.optimizer.state_dict()
    saving = dcp.async_save(state, storage_writer=writer, process_group=group, async_stager=stager)
    train(trainer, range(2, 5))
    getattr(saving, "upload_completion", saving).result()
    with_dcp_load(other, path)
    casts.assert_same_bytes(snapshot(other), wanted, f"rank {trainer.rank}")


class _Slow(dcp.FileSystemWriter):
    def prepare_local_plan(self, plan: Any) -> Any:
        import time

        time.sleep(0.5)
        return super().prepare_local_plan(plan)


@pytest.mark.parametrize("world", [1, 2])
def test_asynchronous_save(ranks, tmp_path, world):
    ranks(world)(staged, str(tmp_path / "checkpoint"))
