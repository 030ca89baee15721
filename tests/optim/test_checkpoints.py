"""Folders of checkpoints: which of them are kept, what is asked for, and saves that go on while training does."""

import dataclasses
import shutil
import threading
from typing import Any
from unittest import mock

import pytest

from tests import casts
from tests.optim.checkpoint_folders import FEW, names, saved
from tests.optim.runs import OVERLAP, Trainer, snapshot
from tests.selection import worlds
from zerocast.checkpoint import checkpoint
from zerocast.optim import Checkpoints


def keeps(folder: str, keep: int | None) -> None:
    trainer, checkpoints = Trainer(FEW), Checkpoints(folder, keep)
    for step in (5, 10, 15, 20, 15):
        trainer.step(step)
        checkpoints.save(trainer.optimizer, step)


@pytest.mark.parametrize(("keep", "left"), [(None, [5, 10, 15, 20]), (1, [15]), (2, [15, 20]), (9, [5, 10, 15, 20])])
@pytest.mark.parametrize("world", [1, 2])
def test_the_last_are_kept(ranks, tmp_path, keep, left, world):
    """Step 15 is saved a second time: it stays, whatever else goes, and so does what is the user's."""
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "step_00000001.partial").mkdir()
    (folder / "notes.txt").write_text("mine")
    ranks(world)(keeps, str(folder), keep)
    assert Checkpoints(folder).steps() == left
    assert names(folder) == sorted(["notes.txt", "step_00000001.partial", *(f"step_{step:08d}" for step in left)])


def test_arguments(tmp_path):
    with pytest.raises(ValueError, match="keep is None or at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint; there are: none"):
        Checkpoints(tmp_path / "nowhere").load(Trainer(FEW).optimizer)
    saved(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 7; there are: \[1, 2\]"):
        Checkpoints(tmp_path).load(Trainer(FEW).optimizer, step=7)


def test_a_save_whose_folder_is_deleted(tmp_path):
    """By hand, or by a run that took the folder over: it raises, and older ones stay."""
    saved(str(tmp_path))
    checkpoints, trainer, original = Checkpoints(tmp_path), Trainer(FEW), checkpoint._of_all_ranks

    def disturbed(sums: Any, group: Any) -> Any:
        shutil.rmtree(next(tmp_path.glob("*.partial")))
        return original(sums, group)

    with (
        mock.patch.object(checkpoint, "_of_all_ranks", disturbed),
        pytest.raises(RuntimeError, match="step_00000003 was not written"),
    ):
        checkpoints.save(trainer.optimizer, 3)
    assert checkpoints.steps() == [1, 2]
    checkpoints.save(trainer.optimizer, 3)
    assert checkpoints.load(trainer.optimizer) == 3


def asynchronous(folder: str) -> bool:
    """Steps go on while a slow disk writes; what is written is the state of the moment of the call. Whether it was slow."""
    checkpoints = Checkpoints(folder, keep=2, asynchronous=True)
    trainer, other = (
        Trainer(dataclasses.replace(FEW, config=OVERLAP)),
        Trainer(dataclasses.replace(FEW, config=OVERLAP)),
    )
    may_write, original = threading.Event(), checkpoint.write

    def slow(*args: Any, **kwargs: Any) -> None:
        assert may_write.wait(30)
        original(*args, **kwargs)

    wanted = {}
    with mock.patch.object(checkpoint, "write", slow):
        for step in range(1, 7):
            trainer.step(step)
            if step % 2 == 0:
                may_write.set()
                wanted[step] = snapshot(trainer)
                checkpoints.save(trainer.optimizer, step)
                may_write.clear()
        unfinished = 6 not in checkpoints.steps()
        may_write.set()
        checkpoints.wait()
    assert checkpoints.steps() == [4, 6]
    for step in (4, 6):
        assert checkpoints.load(other.optimizer, step) == step
        casts.assert_same_bytes(snapshot(other), wanted[step], f"rank {trainer.rank}, step {step}")
    return unfinished


@pytest.mark.parametrize("world", worlds(2, slow=[1, 3]))
def test_asynchronous(ranks, tmp_path, world):
    assert any(ranks(world)(asynchronous, str(tmp_path / "c")))


def test_asynchronous_without_a_process_group(tmp_path):
    asynchronous(str(tmp_path))
