"""Checkpoints are whole or not there: full disks, damaged files, kills, asynchronous saves, and which of them are kept."""

import contextlib
import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from tests import casts
from tests.optim.probe import MIXED
from tests.optim.runs import Run, Trainer
from tests.optim.test_resume import snapshot, train
from zerocast import ZeroConfig, optim
from zerocast.optim import Checkpoints, checkpoint, manifest
from zerocast.optim.manifest import Manifest


def names(folder: Path) -> list[str]:
    """What a folder holds."""
    return sorted(path.name for path in folder.iterdir())


# --- whole or not there ---------------------------------------------------------------------------------------------


class Full:
    """A stream to a disk that has no room left after some bytes."""

    def __init__(self, stream: Any, room: int) -> None:
        self._stream, self._room = stream, room

    def write(self, data: Any) -> int:
        self._room -= len(memoryview(data).cast("B"))
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written: int = self._stream.write(data)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file of torch.distributed.checkpoint can have more than `room` bytes."""
    original = FileSystem.create_stream

    @contextlib.contextmanager
    def create_stream(self: FileSystem, path: Any, mode: str) -> Iterator[Any]:
        with original(self, path, mode) as stream:
            yield Full(stream, room) if "w" in mode else stream

    with mock.patch.object(FileSystem, "create_stream", create_stream):
        yield


@contextlib.contextmanager
def no_room_for(name: str) -> Iterator[None]:
    """A call of os fails, as on a full or broken disk."""
    with mock.patch.object(os, name, side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        yield


@contextlib.contextmanager
def no_room_for_the_manifest() -> Iterator[None]:
    with mock.patch.object(Manifest, "write", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        yield


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "no byte": lambda: full_disk(0),
    "half a tensor": lambda: full_disk(3000),
    "the manifest": no_room_for_the_manifest,
    "to the disk": lambda: no_room_for("fsync"),
    "the rename": lambda: no_room_for("rename"),
}


def saves_on_a_full_disk(folder: str, fault: str, culprit: int, asynchronous: bool) -> str:
    """What the second save says, whose disk is full on one rank; afterwards the first is loaded and training goes on."""
    checkpoints = Checkpoints(folder, asynchronous=asynchronous)
    trainer = Trainer(Run())
    train(trainer, range(2))
    checkpoints.save(trainer.optimizer, 2)
    checkpoints.wait()
    wanted = snapshot(trainer)
    train(trainer, range(2, 4))
    later = snapshot(trainer)
    with FAULTS[fault]() if trainer.rank == culprit else contextlib.nullcontext():
        said = _error_of_saving(checkpoints, trainer, 4)
        _together()
    casts.assert_same_bytes(snapshot(trainer), later, f"rank {trainer.rank}, after the fault")
    assert names(Path(folder)) == ["step_00000002"]
    other = Trainer(Run())
    assert checkpoints.load(other.optimizer) == 2
    casts.assert_same_bytes(snapshot(other), wanted, f"rank {trainer.rank}, loaded")
    _together()
    checkpoints.save(trainer.optimizer, 4)
    checkpoints.wait()
    assert checkpoints.load(other.optimizer) == 4
    casts.assert_same_bytes(snapshot(other), later, f"rank {trainer.rank}, saved again")
    return said


def _error_of_saving(checkpoints: Checkpoints, trainer: Trainer, step: int) -> str:
    try:
        checkpoints.save(trainer.optimizer, step)
        checkpoints.wait()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_full_disk(tmp_path, fault):
    said = saves_on_a_full_disk(str(tmp_path), fault, 0, asynchronous=False)
    assert "step_00000004 was not written: " in said
    assert "No space left on device" in said


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("fault", "culprit"), [("half a tensor", 1), ("half a tensor", 0), ("the manifest", 0)])
def test_a_full_disk_on_one_rank(ranks, tmp_path, fault, culprit, asynchronous):
    for said in ranks(2)(saves_on_a_full_disk, str(tmp_path / "c"), fault, culprit, asynchronous):
        assert "No space left on device" in said


def test_a_checkpoint_is_not_overwritten(tmp_path):
    trainer = Trainer(Run())
    optim.save(trainer.optimizer, tmp_path / "here")
    before = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    with pytest.raises(RuntimeError, match="is there already: a checkpoint is not overwritten"):
        optim.save(trainer.optimizer, tmp_path / "here")
    assert {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()} == before


def test_nothing_has_the_final_name_before_it_is_whole(tmp_path):
    """Before the rename there is another folder, with everything in it, on the disk."""
    trainer, seen = Trainer(Run()), []
    original, synced = Path.rename, []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        if self.name == "here.partial":
            seen.append((names(tmp_path), set(names(self)), set(synced)))
        return original(self, target)

    with mock.patch.object(Path, "rename", rename), mock.patch.object(os, "fsync", record):
        optim.save(trainer.optimizer, tmp_path / "here")
    ((folder, held, on_disk),) = seen
    assert folder == ["here.partial"]
    assert held == set(names(tmp_path / "here")) >= {manifest.NAME, ".metadata"}
    written = {str(tmp_path / "here.partial" / name) for name in held - {".metadata"}}
    assert written | {str(tmp_path / "here.partial")} <= on_disk
    assert synced[-1] == str(tmp_path)


# --- damage ---------------------------------------------------------------------------------------------------------


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


DAMAGE = {truncate: "bytes, and had", flip: "is damaged: its SHA-256 is", Path.unlink: "is missing; it had"}


def refuses(folder: str) -> tuple[str, int]:
    """What loading the damaged step says, the optimizer unchanged; and which step is loaded when none is asked for."""
    trainer, checkpoints = Trainer(Run()), Checkpoints(folder)
    before = snapshot(trainer)
    with pytest.raises(ValueError, match="when it was written") as caught:
        checkpoints.load(trainer.optimizer, step=2)
    casts.assert_same_bytes(snapshot(trainer), before)
    return str(caught.value), checkpoints.load(trainer.optimizer)


def saved(folder: str, steps: range = range(1, 3)) -> None:
    trainer, checkpoints = Trainer(Run()), Checkpoints(folder)
    for step in steps:
        trainer.step(step)
        checkpoints.save(trainer.optimizer, step)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damaged_files(ranks, tmp_path, damage):
    """Every file of a checkpoint of two ranks in turn, read on one and on two; the one before is still there."""
    ranks(2)(saved, str(tmp_path / "whole"))
    files = [name for name in names(tmp_path / "whole" / "step_00000002") if name not in (manifest.NAME, ".metadata")]
    assert len(files) == 2
    for number, name in enumerate([*files, ".metadata"]):
        if name == ".metadata" and damage is Path.unlink:
            continue  # then it is no checkpoint
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        damage(folder / "step_00000002" / name)
        for said, step in [refuses(str(folder)), *ranks(2)(refuses, str(folder))]:
            assert DAMAGE[damage] in said
            assert f"step_00000002/{name}" in said
            assert step == 1


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"version": 1, "files": []}', '{"version": 9, "files": {}}', "[" * 100_000, '{"version": 1'],
    ids=repr,
)
def test_a_damaged_manifest(tmp_path, content):
    saved(str(tmp_path))
    (tmp_path / "step_00000002" / manifest.NAME).write_text(content)
    trainer = Trainer(Run())
    with pytest.raises(ValueError, match=r"manifest.json (is damaged|has version 9, this zerocast reads version 1)"):
        Checkpoints(tmp_path).load(trainer.optimizer, step=2)
    assert Checkpoints(tmp_path).load(trainer.optimizer) == 1


def test_a_manifest_names_no_file_elsewhere(tmp_path):
    saved(str(tmp_path))
    path = tmp_path / "step_00000002" / manifest.NAME
    content = json.loads(path.read_text())
    content["files"]["../../secret"] = {"bytes": 1, "sha256": ""}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"'\.\./\.\./secret' is no file of the checkpoint"):
        Checkpoints(tmp_path).load(Trainer(Run()).optimizer, step=2)


def test_all_damaged(tmp_path, caplog):
    saved(str(tmp_path))
    for folder in tmp_path.iterdir():
        flip(next(folder.glob("*.distcp")))
    with caplog.at_level(logging.WARNING, "zerocast"), pytest.raises(ValueError, match=r"step_00000001/.* is damaged"):
        Checkpoints(tmp_path).load(Trainer(Run()).optimizer)
    assert [r.getMessage()[:38] for r in caplog.records if r.name.startswith("zerocast")] == [
        "passing over the checkpoint of step 2:"
    ]


def test_what_does_not_fit_is_named_with_both_values(tmp_path):
    optim.save(Trainer(Run()).optimizer, tmp_path / "all")
    optim.save(Trainer(Run(MIXED[:-1])).optimizer, tmp_path / "fewer")
    with pytest.raises(ValueError, match=r"model\.bias is there and is no parameter of the optimizer here"):
        optim.load(Trainer(Run(MIXED[:-1])).optimizer, tmp_path / "all")
    with pytest.raises(ValueError, match=r"model\.bias is missing"):
        optim.load(Trainer(Run()).optimizer, tmp_path / "fewer")


# --- which are kept -------------------------------------------------------------------------------------------------


def keeps(folder: str, keep: int | None) -> None:
    trainer, checkpoints = Trainer(Run(MIXED[:3])), Checkpoints(folder, keep)
    for step in (5, 10, 15, 20, 15):
        trainer.step(step)
        checkpoints.save(trainer.optimizer, step)


@pytest.mark.parametrize(("keep", "left"), [(None, [5, 10, 15, 20]), (1, [15]), (2, [15, 20]), (9, [5, 10, 15, 20])])
@pytest.mark.parametrize("world", [1, 2])
def test_the_last_are_kept(ranks, tmp_path, keep, left, world):
    """Step 15 is saved a second time, as after going back to 10: it stays, whatever else goes."""
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "step_00000001.partial").mkdir()
    (folder / "notes.txt").write_text("mine")
    ranks(world)(keeps, str(folder), keep)
    assert Checkpoints(folder).steps() == left
    assert names(folder) == ["notes.txt", *(f"step_{step:08d}" for step in left)]


def test_arguments(tmp_path):
    with pytest.raises(ValueError, match="keep is None or at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint; there are: none"):
        Checkpoints(tmp_path / "nowhere").load(Trainer(Run()).optimizer)
    saved(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 7; there are: \[1, 2\]"):
        Checkpoints(tmp_path).load(Trainer(Run()).optimizer, step=7)


# --- while training goes on -----------------------------------------------------------------------------------------

OVERLAP = ZeroConfig(bucket_size=4096, deterministic=True, overlap_all_gather=True)


def asynchronous(folder: str) -> bool:
    """Steps go on while a slow disk writes; what is written is the state of the moment of the call. Whether it was slow."""
    checkpoints = Checkpoints(folder, keep=2, asynchronous=True)
    trainer, other = Trainer(Run(config=OVERLAP)), Trainer(Run(config=OVERLAP))
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


@pytest.mark.parametrize("world", [1, 2, 3])
def test_asynchronous(ranks, tmp_path, world):
    assert any(ranks(world)(asynchronous, str(tmp_path / "c")))


def test_asynchronous_without_a_process_group(tmp_path):
    asynchronous(str(tmp_path))
