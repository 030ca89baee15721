"""Power failures and kills at every change of the file system that a save makes: a whole checkpoint always loads.

As SQLite is tested: each call is recorded where it enters the kernel (`recorder.c`), and what the disk may
hold after a power failure there, without what was not synced (`disk.py`), is loaded from. The process is
also killed before each call, for what really is there then.
"""

import json
import random
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoint.crash.disk import (
    Disk,
    Tree,
    all_recorded,
    read_log,
    read_tree,
    recorder_library,
    why_nothing_is_recorded,
    write_tree,
)
from tests.checkpoint.crash.saves import SAVED, SAVES, run, run_and_kill
from tests.workers import START_SECONDS, context
from zerocast.checkpoint import writer

pytestmark = pytest.mark.skipif(why_nothing_is_recorded() is not None, reason=str(why_nothing_is_recorded()))
TWO_RANKS = (
    "the next, the one before goes",
    "in place of itself",
    "in place of itself, while training goes on",
    "export_safetensors",
)


@pytest.fixture(autouse=True)
def dead_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that a power failure has cut does not name its writer. Every writer is dead here, so no test waits to see."""
    monkeypatch.setattr(writer, "WATCHED", 0.0)
    monkeypatch.setattr(writer, "SILENCE", 0.0)


def saved(name: str, folder: Path, world: int = 1) -> list[int | None]:
    """Save on some ranks; their exit codes."""
    processes = []
    for each in range(world):
        places = folder / "root", folder / "log"
        arguments = (str(recorder_library()), name, *places, each, world, 0)
        processes.append(context.Process(target=run, args=arguments, daemon=True))
        processes[-1].start()
    for process in processes:
        process.join(START_SECONDS)
    return [process.exitcode for process in processes]


def prepared(name: str, folder: Path) -> Tree:
    """What is there before the save."""
    (folder / "root").mkdir(parents=True)
    SAVES[name].prepare(folder / "root")
    return read_tree(folder / "root")


def recorded(name: str, folder: Path, world: int = 1) -> Disk:
    """The changes of a save that nothing interrupts."""
    before = prepared(name, folder)
    assert saved(name, folder, world) == [0] * world
    records = list(read_log(folder / "log"))
    assert all_recorded(records)
    disk = Disk(before, folder / "root", records)
    assert disk.after(len(disk.changes), frozenset()) == read_tree(folder / "root"), "something was not recorded"
    return disk


@dataclass(frozen=True)
class Outages:
    """At which changes the power goes: every so many-th, and how many combinations of what is lost are drawn there."""

    every: int
    some: int
    goes_on: bool  # whether what is left must take the next saves

    def check(self, name: str, disk: Disk, folder: Path, draw: random.Random) -> int:
        """Load from all that may be left; how many different states of the disk that were."""
        done, seen = disk.marks()[SAVED], set()
        for end in self._ends(disk):
            for tree in disk.states(end, draw, self.some):
                state = (end >= done, *sorted(tree.items()))
                if state not in seen:
                    seen.add(state)
                    where = (
                        f"the power goes after {end} of {len(disk.changes)} changes, of which {done} before it is done"
                    )
                    write_tree(tree, folder / f"state_{len(seen)}")
                    check(name, folder / f"state_{len(seen)}", end >= done, self.goes_on, where)
        return len(seen)

    def _ends(self, disk: Disk) -> list[int]:
        """Latest first, as most is lost at the end; after bytes were written only where every change is asked for."""
        ends = [
            end for end in range(1, len(disk.changes) + 1) if self.every == 1 or disk.changes[end - 1].what != "write"
        ]
        return [*ends[:: -self.every], 0]


def check(name: str, root: Path, done: bool, goes_on: bool, where: str) -> None:
    left = {path: None if content is None else len(content) for path, content in read_tree(root).items()}
    try:
        SAVES[name].check(root, done)
        if goes_on:
            SAVES[name].goes_on(root)
    except Exception as error:
        raise AssertionError(f"{name}, {where}: {error!r}; left are {left}") from error


THINNED, ALL = Outages(every=3, some=0, goes_on=False), Outages(every=1, some=2, goes_on=True)
SHORT = ("the first", "the next, the one before goes", "in place of itself", "export_safetensors")


@pytest.mark.notices(
    "the power fails, or a process is killed, during a save, also of a step that was saved before",
    where="Checkpoints",
    answer="the checkpoint, or the previous one, is complete and loads",
)
@pytest.mark.parametrize("name", SHORT)
def test_some_power_failures(tmp_path: Path, name: str, seed: int) -> None:
    assert THINNED.check(name, recorded(name, tmp_path / "whole"), tmp_path, random.Random(seed)) > 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SAVES)
def test_power_failures(tmp_path: Path, name: str, seed: int) -> None:
    disk = recorded(name, tmp_path / "whole")
    states = ALL.check(name, disk, tmp_path, random.Random(seed))
    print(f"{name}: {len(disk.changes)} changes, {states} states of the disk")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TWO_RANKS)
def test_power_failures_of_two_ranks(tmp_path: Path, name: str, seed: int) -> None:
    disk = recorded(name, tmp_path / "whole", world=2)
    ALL.check(name, disk, tmp_path, random.Random(seed))


def kills(name: str, folder: Path, world: int = 1, killed: int = 0) -> int:
    """Kill a rank before each change of its save; how many kills that were."""
    arguments = str(recorder_library()), name, folder / "kills", world, killed
    process = context.Process(target=run_and_kill, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0
    left = sorted((folder / "kills").iterdir())
    for at in left:
        codes = json.loads((at / "codes").read_text())
        if at == left[-1]:
            assert codes == [0] * world
        else:
            assert codes.pop(killed) == -signal.SIGKILL
            assert {*codes} <= {0, 1}, f"{at.name}: the other one hangs or crashes"
        done = any(record.what == "mark" for record in read_log(at / "log"))
        check(name, at / "root", done, True, f"{at.name} of rank {killed}")
    return len(left) - 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SAVES)
def test_kills(tmp_path: Path, name: str) -> None:
    assert kills(name, tmp_path) > 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", TWO_RANKS)
def test_kills_of_one_rank_of_two(tmp_path: Path, name: str, rank: int) -> None:
    """The other one raises, and ends."""
    assert kills(name, tmp_path, world=2, killed=rank) > 3
