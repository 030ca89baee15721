"""FSDP2: a rank is killed, or stopped for longer than the timeout and then continued: all others raise in time, nobody goes on."""

import signal
from pathlib import Path

import pytest
import torch

from tests import stopping
from tests.fsdp2 import models
from tests.fsdp2.models import Net
from tests.stopping import Place
from zerocast.checkpoint.sources.manifest import check_files
from zerocast.distributed.group import ONE_PROCESS
from zerocast.fsdp2 import TrainingState
from zerocast.optim import Checkpoints

pytestmark = pytest.mark.slow

WIDTH = 64
REDUCTION = "zerocast.distributed.group:Group"
TORCH = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
PLACES = [
    *(Place(REDUCTION, "all_reduce_max", when) for when in ("before", "during", "after")),
    *(
        Place("zerocast.fsdp2.weight:FSDPWeight", name, when)
        for name in ("send", "receive", "unshard")
        for when in ("before", "after")
    ),
    *(Place(TORCH, name, when) for name in ("foreach_all_gather", "foreach_reduce") for when in ("before", "after")),
    Place("zerocast.checkpoint.whole_folder:ClearWriter", "write_data"),
    Place("zerocast.checkpoint.checkpoint", "_hash_files"),
    Place("zerocast.checkpoint.sources.safe_reader:SafeReader", "read_data"),
]


class Training:
    """A prepared model with torch's AdamW, and its checkpoints."""

    def __init__(self, folder: str) -> None:
        self._model = models.sharded(Net(("nvfp4", models.DELAYED, "mxfp8"), WIDTH, 96))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-2)
        self._state = TrainingState(self._model, self._optimizer)
        self._checkpoints = Checkpoints(folder, keep=2)

    def step(self, number: int) -> None:
        """Forward, backward, step."""
        models.train(self._model, self._optimizer, range(number, number + 1), WIDTH)

    def step_again(self) -> None:
        """A forward pass: torch's optimizer steps over whatever gradients there are."""
        with torch.no_grad():
            self._model(models.batch(9, WIDTH))

    def save(self, number: int) -> None:
        """Of masters and moments."""
        self._checkpoints.save(self._state, number)

    def load(self) -> None:
        """The newest."""
        self._checkpoints.load(self._state)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.notices(
    "a rank is killed, or stopped (SIGSTOP) for longer than the timeout",
    where="FSDP2",
    answer="the others raise within the timeout, the stopped rank when it is continued; nobody trains on or saves",
)
def test_a_rank_that_is_stopped(tmp_path: Path, place: Place, number: signal.Signals, world: int) -> None:
    for said in stopping.check(tmp_path, Training, place, number, world):
        print(said)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.steps(), "a complete checkpoint is there"
    for step in checkpoints.steps():
        check_files(checkpoints.path(step), ONE_PROCESS)
