"""A folder of checkpoints has one living writer, and a dead one is in nobody's way; only our own folders are touched."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.checkpoint.storage import names_in
from zerocast import ZeroAdamW, optim
from zerocast.checkpoint import writer
from zerocast.checkpoint.whole_folder import MARKER, WholeFolder
from zerocast.checkpoint.writer import LEASE, Writer
from zerocast.export import export_safetensors
from zerocast.optim import Checkpoints


def optimizer() -> ZeroAdamW:
    return ZeroAdamW(torch.nn.Linear(8, 8).named_parameters())


def save_and_live(folder: Path, saved: Any) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(optimizer(), 1)
    saved.set()
    time.sleep(600)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Any]:
    """Another process that has saved step 1 into the folder, and lives."""
    forks = multiprocessing.get_context("fork")
    saved = forks.Event()
    process = forks.Process(target=save_and_live, args=(tmp_path, saved), daemon=True)
    process.start()
    assert saved.wait(60)
    yield process
    process.kill()
    process.join()


@pytest.mark.notices(
    "another process saves into the folder, or a killed one did",
    where="Checkpoints",
    answer="RuntimeError; a dead writer is ignored",
)
def test_a_second_writer_and_a_dead_one(tmp_path: Path, other: Any) -> None:
    """The first is killed by SIGKILL, and not even waited for: a zombie is dead, too."""
    checkpoints, ours = Checkpoints(tmp_path), optimizer()
    with pytest.raises(RuntimeError, match=f"process {other.pid} on .* is still writing checkpoints to"):
        checkpoints.save(ours, 2)
    assert not [*tmp_path.glob(f"{LEASE}.*")]  # by which the clock of the file system was read
    assert checkpoints.load(ours) == 1  # readers ask nobody
    os.kill(other.pid, signal.SIGKILL)
    began = time.monotonic()
    while not Writer(**json.loads((tmp_path / LEASE).read_text())["writer"]).has_ended():
        time.sleep(0.01)
    checkpoints.save(ours, 2)
    assert time.monotonic() - began < writer.WATCHED
    assert checkpoints.steps() == [1, 2]


@pytest.mark.parametrize("where", ["host", "boot", "namespace"])
def test_a_dead_writer_that_is_out_of_sight(tmp_path: Path, where: str) -> None:
    """On another host, before this one started again, or in another container: it is dead once it has been silent."""
    lease, ours = tmp_path / LEASE, optimizer()
    elsewhere = {**vars(Writer.this_process()), "boot": "another", where: "another"}
    lease.write_text(json.dumps({"token": "0" * 16, "writer": elsewhere}))
    with mock.patch.multiple(writer, WATCHED=0.3, SILENCE=0.6):
        began = time.monotonic()
        Checkpoints(tmp_path).save(ours, 1)
        assert 0.5 < time.monotonic() - began < 5
        lease.write_text(json.dumps({"token": "0" * 16, "writer": elsewhere}))
        os.utime(lease, (time.time() - 3600,) * 2)
        began = time.monotonic()
        Checkpoints(tmp_path).save(ours, 2)
        assert 0.2 < time.monotonic() - began < 5


def test_a_writer_that_was_taken_over(tmp_path: Path) -> None:
    """The writer stood still, and goes on: its save is not written."""
    checkpoints, ours = Checkpoints(tmp_path), optimizer()
    checkpoints.save(ours, 1)
    original = WholeFolder.begin

    def begin(self: WholeFolder) -> Path:
        partial = original(self)
        (tmp_path / LEASE).write_text(json.dumps({"token": "0" * 16, "writer": vars(Writer.this_process())}))
        return partial

    with mock.patch.object(WholeFolder, "begin", begin), pytest.raises(RuntimeError, match="was taken over by process"):
        checkpoints.save(ours, 2)
    assert checkpoints.steps() == [1]


@pytest.mark.parametrize("end", ["close", "with", "deleted"])
def test_a_writer_that_ends_leaves_nothing(tmp_path: Path, end: str) -> None:
    checkpoints, ours = Checkpoints(tmp_path), optimizer()
    with checkpoints:
        checkpoints.save(ours, 1)
        assert (tmp_path / LEASE).exists()
        if end == "close":
            checkpoints.close()
        elif end == "deleted":
            (tmp_path / LEASE).unlink()
            checkpoints.save(ours, 2)
    assert not (tmp_path / LEASE).exists()


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("mine")


THEIRS: dict[str, Callable[[Path], Path]] = {
    "partial": lambda at: at.with_name(f"{at.name}.partial"),
    "new": lambda at: at.with_name(f"{at.name}.new"),
    "token, partial": lambda at: at.with_name(f"{at.name}.zerocast-0123456789abcdef.partial"),
    "token, new": lambda at: at.with_name(f"{at.name}.zerocast-0123456789abcdef.new"),
    "another step": lambda at: at.with_name("step_backup.partial"),
}
SAVES: dict[str, Callable[[Path], object]] = {
    "Checkpoints": lambda at: Checkpoints(at.parent, keep=1).save(optimizer(), 7),
    "save": lambda at: optim.save(optimizer(), at),
    "export": lambda at: export_safetensors(torch.nn.Linear(8, 8), at),
}


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("theirs", THEIRS)
def test_folders_of_others_stay(tmp_path: Path, theirs: str, save: str) -> None:
    at = tmp_path / "step_00000007"
    _folder(THEIRS[theirs](at))
    SAVES[save](at)
    assert (THEIRS[theirs](at) / "thesis.txt").read_text() == "mine"
    assert names_in(tmp_path) == sorted([at.name, THEIRS[theirs](at).name])
    assert MARKER not in names_in(at)


@pytest.mark.parametrize("save", SAVES)
def test_what_others_have_put_at_the_path_stays(tmp_path: Path, save: str) -> None:
    _folder(tmp_path / "step_00000007")
    with pytest.raises((RuntimeError, ValueError), match=r"already exists|is not empty"):
        SAVES[save](tmp_path / "step_00000007")
    assert names_in(tmp_path) == ["step_00000007"]
    assert names_in(tmp_path / "step_00000007") == ["thesis.txt"]


def test_a_dead_save_is_cleaned_up(tmp_path: Path) -> None:
    """By the next save of that folder, but not one whose writer lives."""
    dead, living = WholeFolder(tmp_path / "model"), WholeFolder(tmp_path / "model")
    stale = Writer(**{**vars(Writer.this_process()), "started": "another"})
    with mock.patch.object(Writer, "this_process", return_value=stale):
        dead.begin()
    living.begin()
    optim.save(optimizer(), tmp_path / "model")
    assert names_in(tmp_path) == ["model", living.partial.name]
