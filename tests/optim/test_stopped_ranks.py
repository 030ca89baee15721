"""ZeRO: a rank is killed, or stopped for longer than the timeout and then continued: all others raise in time, nobody goes on."""

import signal
from pathlib import Path

import pytest

from tests import stopping
from tests.optim.probe import MIXED
from tests.optim.runs import Run, Trainer
from tests.stopping import Place
from zerocast import ZeroConfig
from zerocast.checkpoint.sources.manifest import check_files
from zerocast.distributed.group import ONE_PROCESS
from zerocast.optim import Checkpoints

pytestmark = pytest.mark.slow

GROUP = "zerocast.distributed.group:Group"
PLACES = [
    *(
        Place(GROUP, name, when)
        for name in ("reduce_scatter_mean", "all_reduce_max", "all_gather_into")
        for when in ("before", "during", "after")
    ),
    Place("zerocast.checkpoint.whole_folder:ClearWriter", "write_data"),
    Place("zerocast.checkpoint.whole_folder:ClearWriter", "write_data", "after"),
    Place("zerocast.checkpoint.checkpoint", "_hash_files"),
    Place("zerocast.checkpoint.sources.safe_reader:SafeReader", "read_data"),
    Place("zerocast.checkpoint.sources.safe_reader:SafeReader", "read_data", "after"),
]


class Training:
    """A ZeroAdamW with a gather that overlaps, and its checkpoints."""

    def __init__(self, folder: str) -> None:
        self._trainer = Trainer(Run(MIXED, config=ZeroConfig(bucket_size=4096, overlap_all_gather=True), max_norm=1.0))
        self._checkpoints = Checkpoints(folder, keep=2)

    def step(self, number: int) -> None:
        """Clip, step, and let the scheduler step."""
        self._trainer.step(number)

    def step_again(self) -> None:
        """The optimizer alone."""
        self._trainer.optimizer.step()

    def save(self, number: int) -> None:
        """In place of nothing."""
        self._checkpoints.save(self._trainer.optimizer, number)

    def load(self) -> None:
        """The newest."""
        self._checkpoints.load(self._trainer.optimizer)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.notices(
    "a rank is killed, or stopped (SIGSTOP) for longer than the timeout",
    where="ZeroAdamW",
    answer="the others raise within the timeout, the stopped rank when it is continued; nobody steps on or saves",
)
def test_a_rank_that_is_stopped(tmp_path: Path, place: Place, number: signal.Signals, world: int) -> None:
    for said in stopping.check(tmp_path, Training, place, number, world):
        print(said)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.steps(), "a complete checkpoint is there"
    for step in checkpoints.steps():
        check_files(checkpoints.path(step), ONE_PROCESS)
