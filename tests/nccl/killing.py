"""Two processes that train, of which one dies where it is told to: what becomes of the other, and when."""

import contextlib
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.nccl.dying import DIED, FINISHED
from tests.workers import START_SECONDS, context

TIMEOUT = 10.0  # of the process group
MARGIN = 30.0  # for the watchdog to notice and for the process to end

Train = Callable[[int, str, str, str, float], None]  # rank, backend, URI of a store, place, timeout of its groups


@contextlib.contextmanager
def _ranks(train: Train, backend: str, folder: Path, place: str) -> Iterator[list[BaseProcess]]:
    """Two processes of their own, none of which is left behind."""
    arguments = backend, (folder / "store").as_uri(), place, TIMEOUT
    processes = [context.Process(target=train, args=(rank, *arguments), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def check_error_in_time(train: Train, backend: str, folder: Path, place: str) -> None:
    """Rank 1 dies at the place, and rank 0 ends with an error."""
    with _ranks(train, backend, folder, place) as (other, killed):
        killed.join(START_SECONDS)
        assert killed.exitcode == DIED
        died = time.monotonic()
        other.join(TIMEOUT + MARGIN)
        assert other.exitcode is not None, f"still waiting {TIMEOUT + MARGIN} s after the other rank died"
        assert other.exitcode != FINISHED
        print(f"{backend}, {place}: exit status {other.exitcode} after {time.monotonic() - died:.1f} s")


def check_both_finish(train: Train, backend: str, folder: Path) -> None:
    """Where nobody dies, so that the error above is that of the death."""
    with _ranks(train, backend, folder, "nowhere") as processes:
        for process in processes:
            process.join(START_SECONDS)
        assert [process.exitcode for process in processes] == [FINISHED, FINISHED]
