"""A checkpoint is whole or not there: full disks on any rank, and what is on the disk before it has its name."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from tests import casts
from tests.optim.checkpoint_folders import FEW, names
from tests.optim.runs import Trainer, snapshot
from tests.workers import error_of, on_ranks
from zerocast import optim
from zerocast.checkpoint.manifest import Manifest
from zerocast.optim import Checkpoints

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
# What fails, as on a full or broken disk.
FAULTS: dict[str, tuple[Any, str]] = {
    "a file": (FileSystem, "create_stream"),
    "the manifest": (Manifest, "write"),
    "to the disk": (os, "fsync"),
    "the rename": (os, "rename"),
}
ON_ONE_RANK = [("a file", 1), ("a file", 0), ("the manifest", 0)]


@pytest.mark.parametrize(
    ("world", "fault", "culprit", "asynchronous"),
    [
        *((0, fault, 0, False) for fault in FAULTS),
        *((2, *case, True) for case in ON_ONE_RANK),
        *(pytest.param(2, *case, False, marks=pytest.mark.slow) for case in ON_ONE_RANK),
    ],
)
@on_ranks()
def test_a_full_disk(tmp_path: Path, world: int, fault: str, culprit: int, asynchronous: bool) -> None:
    """It is full on one rank in the second save; afterwards the first is loaded and training goes on."""
    folder = tmp_path / "c"
    checkpoints = Checkpoints(folder, asynchronous=asynchronous)
    trainer = Trainer(FEW)
    trainer.train(range(2))
    checkpoints.save(trainer.optimizer, 2)
    checkpoints.wait()
    wanted = snapshot(trainer)
    trainer.train(range(2, 4))
    later = snapshot(trainer)
    fails = mock.patch.object(*FAULTS[fault], side_effect=FULL)
    with fails if trainer.rank == culprit else contextlib.nullcontext():
        said = error_of(lambda: checkpoints.save(trainer.optimizer, 4)) or error_of(checkpoints.wait)
        _together()
    casts.assert_same_bytes(snapshot(trainer), later, f"rank {trainer.rank}, after the fault")
    assert names(folder) == ["step_00000002"]
    other = Trainer(FEW)
    assert checkpoints.load(other.optimizer) == 2
    casts.assert_same_bytes(snapshot(other), wanted, f"rank {trainer.rank}, loaded")
    _together()
    checkpoints.save(trainer.optimizer, 4)
    checkpoints.wait()
    assert checkpoints.load(other.optimizer) == 4
    casts.assert_same_bytes(snapshot(other), later, f"rank {trainer.rank}, saved again")
    assert "No space left on device" in said
    assert world or "step_00000004 was not written: " in said


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()


def test_a_checkpoint_is_not_overwritten(tmp_path):
    trainer = Trainer(FEW)
    optim.save(trainer.optimizer, tmp_path / "here")
    before = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    with pytest.raises(
        RuntimeError, match="already exists: checkpoints, and files that zerocast has not written, are not overwritten"
    ):
        optim.save(trainer.optimizer, tmp_path / "here")
    assert {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()} == before
