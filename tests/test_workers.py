"""The pool itself: results by rank, and nothing that a case does to it reaches the next one."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.workers import Ranks, RanksFailed, on_ranks


def add(x: int) -> int:
    total = torch.tensor([dist.get_rank() + x])
    dist.all_reduce(total)
    return int(total)


def fail_on_one() -> None:
    found = dist.get_rank()
    assert found == 0


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def skip_a_collective_on_one() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def start_a_process() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def return_what_cannot_be_pickled() -> object:
    return lambda: None


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
def test_what_ranks_have_started_ends_with_them(ranks: Ranks) -> None:
    started = ranks(2)(start_a_process)
    assert all(map(is_running, started))
    with pytest.raises(RanksFailed):
        ranks(2)(fail_on_one)
    deadline = time.monotonic() + 10
    while any(map(is_running, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, started))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (fail_on_one, "--- rank 1 ---\nTraceback .*assert found == 0.*found = 1"),
        (die_on_one, "--- rank 1 ---\nthe process died"),
        (skip_a_collective_on_one, "--- rank 0 ---\nno answer in time"),
        (return_what_cannot_be_pickled, "--- rank 0 ---\nTraceback .*pickle"),
    ],
)
def test_a_failure_fails_the_case_and_not_the_next(ranks: Ranks, case: Callable[[], object], said: str) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=f"(?s){case.__name__} on 2 ranks\n.*{said}"):
        ranks(2)(case, timeout=3.0)
    assert time.monotonic() - start < 20.0
    assert ranks(2)(add, 1) == [3, 3]


@pytest.mark.parametrize("more", [1, 2])
@on_ranks(0, 1, 2)
def test_a_body_runs_on_every_rank(world: int, more: int) -> None:
    assert (dist.get_world_size() if dist.is_initialized() else 0) == world
    assert not world or add(more) == world * more + sum(range(world))
    assert torch.get_num_threads() == 1
