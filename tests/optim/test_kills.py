"""kill -9 at random moments of training with a checkpoint a step: whatever is left, the run ends as if nothing had happened."""

import random
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.optim.killed import train
from tests.workers import START_SECONDS, context
from zerocast.optim import Checkpoints


def start(folder: Path, world: int, number: int, steps: int, asynchronous: bool) -> list[BaseProcess]:
    store = (folder / f"store_{number}").as_uri()
    processes = []
    for rank in range(world):
        arguments = (rank, world, str(folder), store, steps, asynchronous)
        processes.append(context.Process(target=train, args=arguments, daemon=True))
        processes[-1].start()
    return processes


def ends(folder: Path, world: int) -> list[str]:
    """The hashes that the ranks have left; empty when they were killed before."""
    return [file.read_text() for rank in range(world) if (file := folder / f"end_{rank}").exists()]


def interrupted(
    folder: Path, world: int, steps: int, asynchronous: bool, draw: random.Random, number: int
) -> tuple[list[str], int]:
    """Kill and go on until the end is reached; the hashes, and how often it was killed."""
    folder.mkdir()
    kills = 0
    while len(ends(folder, world)) < world:
        before = Checkpoints(folder / "checkpoints").steps()
        processes = start(folder, world, number + kills, steps, asynchronous)
        processes[draw.randrange(world)].join(draw.uniform(0.2, 2.5 + kills / 4))
        killed = [process for process in draw.sample(processes, world) if process.is_alive()]
        for process in killed:
            process.kill()
        for process in processes:
            process.join()
        kills += bool(killed)
        assert all(process.exitcode in (0, -9) for process in processes) or world > 1
        assert max(Checkpoints(folder / "checkpoints").steps(), default=0) >= max(before, default=0)
    return ends(folder, world), kills


def uninterrupted(folder: Path, world: int, steps: int) -> list[str]:
    folder.mkdir()
    for process in start(folder, world, 0, steps, asynchronous=False):
        process.join(START_SECONDS)
    return ends(folder, world)


def check(tmp_path: Path, world: int, steps: int, asynchronous: bool, wanted_kills: int, seed: int) -> None:
    whole = uninterrupted(tmp_path / "whole", world, steps)
    assert len(whole) == world
    draw, kills, number = random.Random(seed), 0, 0
    while kills < wanted_kills:
        found, killed = interrupted(tmp_path / str(number), world, steps, asynchronous, draw, number)
        assert found == whole
        kills, number = kills + killed, number + 1
    print(f"{kills} kills in {number} runs on {world} ranks")


def test_a_few_kills(tmp_path, seed):
    check(tmp_path, 1, 8, False, 1, seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_many_kills(tmp_path, seed, world, asynchronous):
    """Fifty and more in all."""
    check(tmp_path, world, 30, asynchronous, 13, seed)
