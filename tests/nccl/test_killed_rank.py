"""A rank that is killed in the middle of a step leaves the other with an error, not a hang.

With gloo that is an exception. With NCCL the host runs ahead of the GPU and waits there; the watchdog of the process group ends the
process, some seconds after the group's timeout. Both are errors to whatever started the process: an exit status that is not zero.
"""

import contextlib
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.devices import gpus
from tests.nccl.dying import DIED, FINISHED, PLACES, train
from tests.workers import START_SECONDS, context

TIMEOUT = 10.0  # of the process group
MARGIN = 30.0  # for the watchdog to notice and for the process to end
BACKENDS = ["gloo", pytest.param("nccl", marks=gpus(2))]


@contextlib.contextmanager
def ranks(*args: object) -> Iterator[list[BaseProcess]]:
    """Two processes of their own, none of which is left behind."""
    processes = [context.Process(target=train, args=(rank, *args), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", PLACES)
def test_the_other_rank_gets_an_error_in_time(tmp_path: Path, place: str, backend: str) -> None:
    with ranks(backend, (tmp_path / "store").as_uri(), place, TIMEOUT) as (other, killed):
        killed.join(START_SECONDS)
        assert killed.exitcode == DIED
        died = time.monotonic()
        other.join(TIMEOUT + MARGIN)
        assert other.exitcode is not None, f"still waiting {TIMEOUT + MARGIN} s after the other rank died"
        assert other.exitcode != FINISHED
        print(f"{backend}, {place}: exit status {other.exitcode} after {time.monotonic() - died:.1f} s")


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_death_both_finish(tmp_path: Path, backend: str) -> None:
    """So that the error above is that of the death."""
    with ranks(backend, (tmp_path / "store").as_uri(), "nowhere", TIMEOUT) as processes:
        for process in processes:
            process.join(START_SECONDS)
        assert [process.exitcode for process in processes] == [FINISHED, FINISHED]
