"""Folders of checkpoints: which are kept, saves that go on while training does, full disks; damaged ones, and such as do not fit,
are refused with nothing changed, and the one before still loads.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from tests import casts
from tests.checkpoint.storage import FEW, names_in, save_few
from tests.optim.runs import OVERLAP, Run, Trainer, refused, snapshot
from tests.selection import worlds
from tests.workers import error_of, on_ranks
from zerocast import optim
from zerocast.checkpoint import checkpoint, manifest
from zerocast.checkpoint.manifest import Manifest
from zerocast.optim import Checkpoints


def test_arguments(tmp_path):
    with pytest.raises(ValueError, match="keep is None or at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint; there are: none"):
        Checkpoints(tmp_path / "nowhere").load(Trainer(FEW).optimizer)
    save_few(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 7; there are: \[1, 2\]"):
        Checkpoints(tmp_path).load(Trainer(FEW).optimizer, step=7)


def test_a_save_whose_folder_is_deleted(tmp_path):
    """A save raises if its folder is deleted by hand, or by a run that took it over. Older ones stay."""
    save_few(str(tmp_path), range(1, 4))
    checkpoints, trainer, original = Checkpoints(tmp_path, keep=None), Trainer(FEW), checkpoint._of_all_ranks

    def disturbed(sums: Any, group: Any) -> Any:
        shutil.rmtree(next(tmp_path.glob("*.partial")))
        return original(sums, group)

    with (
        mock.patch.object(checkpoint, "_of_all_ranks", disturbed),
        pytest.raises(RuntimeError, match="step_00000004 was not written"),
    ):
        checkpoints.save(trainer.optimizer, 4)
    assert checkpoints.steps() == [1, 2, 3]
    checkpoints.save(trainer.optimizer, 4)
    assert checkpoints.steps() == [1, 2, 3, 4]
    assert checkpoints.load(trainer.optimizer) == 4


def asynchronous(folder: str) -> bool:
    """Go on with steps while a slow disk writes the state at the time of the call. Return whether it was slow."""
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


# -- a checkpoint is whole or not there

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
# Calls that fail, as on a full or broken disk.
FAULTS: dict[str, tuple[Any, str]] = {
    "a file": (FileSystem, "create_stream"),
    "the manifest": (Manifest, "write"),
    "to the disk": (os, "fsync"),
    "the rename": (os, "rename"),
}
ON_ONE_RANK = [("a file", 1), ("a file", 0), ("the manifest", 0)]


def together() -> None:
    if dist.is_initialized():
        dist.barrier()


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
    """The disk of one rank is full in the second save. The first still loads, and training goes on."""
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
        together()
    casts.assert_same_bytes(snapshot(trainer), later, f"rank {trainer.rank}, after the fault")
    assert names_in(folder) == ["step_00000002"]
    other = Trainer(FEW)
    assert checkpoints.load(other.optimizer) == 2
    casts.assert_same_bytes(snapshot(other), wanted, f"rank {trainer.rank}, loaded")
    together()
    checkpoints.save(trainer.optimizer, 4)
    checkpoints.wait()
    assert checkpoints.load(other.optimizer) == 4
    casts.assert_same_bytes(snapshot(other), later, f"rank {trainer.rank}, saved again")
    assert "No space left on device" in said
    assert world or "step_00000004 was not written: " in said


# -- damaged ones


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


DAMAGE = {truncate: "bytes, and had", flip: "is damaged: its SHA-256 is", Path.unlink: "is missing; it had"}


def refuses(folder: str) -> tuple[str, int]:
    """Return the error of loading the damaged step, which leaves the optimizer unchanged, and the step that
    loads by default.
    """
    trainer, checkpoints = Trainer(FEW), Checkpoints(folder)
    said = refused(trainer, lambda: checkpoints.load(trainer.optimizer, step=2))
    assert said.startswith("ValueError")
    return said, checkpoints.load(trainer.optimizer)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damaged_files(ranks, tmp_path, damage):
    """Damage of any file of a checkpoint of two ranks is refused. The checkpoint before still loads."""
    ranks(2)(save_few, str(tmp_path / "whole"))
    files = [
        name for name in names_in(tmp_path / "whole" / "step_00000002") if name not in (manifest.NAME, ".metadata")
    ]
    assert len(files) == 2
    for number, name in enumerate([*files, ".metadata"]):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        damage(folder / "step_00000002" / name)
        # On two ranks each reads a file that the other one wrote. The first file is read by one
        # process instead.
        readers = ranks(2)(refuses, str(folder)) if number else [refuses(str(folder))]
        for said, step in readers:
            assert DAMAGE[damage] in said
            assert f"step_00000002/{name}" in said
            assert step == 1


def test_damage_is_found_before_masters_are_loaded(tmp_path):
    save_few(str(tmp_path))
    trainer, folder = Trainer(FEW), tmp_path / "step_00000002"
    flip(next(folder.glob("*.distcp")))
    assert DAMAGE[flip] in refused(trainer, lambda: optim.load_masters(trainer.optimizer, folder))


def test_a_damaged_manifest(tmp_path):
    save_few(str(tmp_path))
    path = tmp_path / "step_00000002" / manifest.NAME
    for content in ("[" * 100_000, path.read_text().replace('"step": 2', '"step": 3')):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
            Checkpoints(tmp_path).load(Trainer(FEW).optimizer, step=2)


def test_a_manifest_names_no_file_elsewhere(tmp_path):
    save_few(str(tmp_path))
    path = tmp_path / "step_00000002" / manifest.NAME
    content = json.loads(path.read_text())
    content["files"]["../../secret"] = {"bytes": 1, "sha256": ""}
    del content["sha256"]
    path.write_text(json.dumps({**content, "sha256": manifest.digest(content)}))
    with pytest.raises(ValueError, match=r"'\.\./\.\./secret' is not a file of the checkpoint"):
        Checkpoints(tmp_path).load(Trainer(FEW).optimizer, step=2)


@pytest.mark.notices(
    "manifest.json is deleted",
    where="Checkpoints",
    answer="counts as damaged: an error if it is asked for, else the previous one is loaded",
)
def test_no_manifest(ranks, tmp_path, caplog):
    """These folders always have one. A folder of another program loads without, and the log says that nothing is checked."""
    save_few(str(tmp_path))
    (tmp_path / "step_00000002" / manifest.NAME).unlink()
    for said, step in [refuses(str(tmp_path)), *ranks(2)(refuses, str(tmp_path))]:
        assert "step_00000002/manifest.json is missing, so the files of the checkpoint cannot be checked" in said
        assert step == 1
    with caplog.at_level(logging.WARNING, "zerocast"):
        optim.load(Trainer(FEW).optimizer, tmp_path / "step_00000002")
    assert "step_00000002 has no manifest.json: its files are not checked" in caplog.text


def test_exchanged_folders(tmp_path):
    save_few(str(tmp_path))
    first, second, aside = tmp_path / "step_00000001", tmp_path / "step_00000002", tmp_path / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    with pytest.raises(ValueError, match=r"manifest.json has step 1, expected 2"):
        Checkpoints(tmp_path).load(Trainer(FEW).optimizer, step=2)
    with pytest.raises(ValueError, match=r"manifest.json has step 2, expected 1"):
        Checkpoints(tmp_path).load(Trainer(FEW).optimizer)


def test_all_damaged(tmp_path, caplog):
    save_few(str(tmp_path))
    caplog.clear()
    for folder in tmp_path.iterdir():
        flip(next(folder.glob("*.distcp")))
    with caplog.at_level(logging.WARNING, "zerocast"), pytest.raises(ValueError, match=r"step_00000001/.* is damaged"):
        Checkpoints(tmp_path).load(Trainer(FEW).optimizer)
    assert [r.getMessage()[:34] for r in caplog.records if r.name.startswith("zerocast")] == [
        "skipping the checkpoint of step 2:"
    ]


def test_what_does_not_fit_is_named_with_both_values(tmp_path):
    fewer = Run(FEW.specs[:-1])
    optim.save(Trainer(FEW).optimizer, tmp_path / "all")
    optim.save(Trainer(fewer).optimizer, tmp_path / "fewer")
    with pytest.raises(ValueError, match=r"model\.bias is in the checkpoint, but not a parameter of this optimizer"):
        optim.load(Trainer(fewer).optimizer, tmp_path / "all")
    with pytest.raises(ValueError, match=r"model\.bias is missing"):
        optim.load(Trainer(FEW).optimizer, tmp_path / "fewer")
