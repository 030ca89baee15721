"""A rank that hangs (SIGSTOP) or dies (SIGKILL) anywhere in a step is an error on all others, in time and never silent."""

from pathlib import Path

import pytest

from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.stopping import FAULTS, PLACES, RANKS, train
from tests.workers import START_SECONDS, context

TIMEOUT = 5.0  # of the process groups
MARGIN = 10.0

pytestmark = [needs_megatron, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.notices(
    "a rank hangs for longer than the timeout, or dies, anywhere in a step",
    where="Megatron",
    answer="raises on every other rank within the timeout and 10 s",
)
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", PLACES)
def test_the_others_raise_in_time(tmp_path: Path, place: str, fault: str, overlap: bool) -> None:
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    store = (tmp_path / "store").as_uri()
    processes = [
        context.Process(target=train, args=(rank, store, place, fault, overlap, TIMEOUT, said), daemon=True)
        for rank, (_, said) in enumerate(pipes)
    ]
    try:
        for process in processes:
            process.start()
        heard = [hears for hears, _ in pipes]
        assert heard[-1].poll(START_SECONDS), "nothing fell"
        fell, what = heard[-1].recv()
        assert what == "falls"
        for rank, hears in enumerate(heard[:-1]):
            assert hears.poll(TIMEOUT + MARGIN), (
                f"rank {rank} still waits {TIMEOUT + MARGIN} s after rank {RANKS - 1} fell"
            )
            when, error = hears.recv()
            assert error is not None, f"rank {rank} has noticed nothing"
            assert when - fell < TIMEOUT + MARGIN, (rank, when - fell, error)
            print(f"rank {rank} after {when - fell:.1f} s: {error:.200}")
    finally:
        for process in processes:
            process.kill()
            process.join()
