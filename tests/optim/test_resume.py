"""Checkpoints: what is loaded is what was saved, and what follows is what would have followed, to the bit."""

from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests import casts
from tests.optim.probe import FP32, Spec
from tests.optim.runs import Run, Trainer, boxes, snapshot
from zerocast import ZeroConfig, optim


def with_dcp_load(trainer: Trainer, path: str) -> None:
    """In place, then taken over."""
    state = trainer.optimizer.state_dict()
    dcp.load(state, checkpoint_id=path)
    trainer.optimizer.load_state_dict(state)


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
    trainer.train(range(2))
    wanted = snapshot(trainer)
    group = dist.new_group(backend="gloo")
    writer = _Slow(path)
    stager = dcp.staging.DefaultStager(dcp.staging.StagingOptions(False, False, False, False))
    state = trainer.optimizer.state_dict()
    saving = dcp.async_save(state, storage_writer=writer, process_group=group, async_stager=stager)
    trainer.train(range(2, 5))
    getattr(saving, "upload_completion", saving).result()
    with_dcp_load(other, path)
    casts.assert_same_bytes(snapshot(other), wanted, f"rank {trainer.rank}")


class _Slow(dcp.filesystem.FileSystemWriter):
    def prepare_local_plan(self, plan: Any) -> Any:
        import time

        time.sleep(0.5)
        return super().prepare_local_plan(plan)


@pytest.mark.parametrize("world", [1, 2])
def test_asynchronous_save(ranks, tmp_path, world):
    ranks(world)(staged, str(tmp_path / "checkpoint"))
