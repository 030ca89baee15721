"""The host does not wait for the work of the step that it issues; what it has not read yet, whatever
saves, verifies, evaluates or ends reads.
"""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import DELAYED, Net
from tests.fsdp2.test_freshness import write_data
from tests.observed import HostTraffic
from tests.workers import error_of, on_ranks
from zerocast import optim
from zerocast.distributed.late_copy import LateCopy
from zerocast.fsdp2 import FusedAdamW, TrainingState, gather_status
from zerocast.fsdp2.gather_status import MAX_PASSES, GatherStatus
from zerocast.weight.validity import Validity

FORMATS = ("nvfp4", DELAYED)


class Event:
    """An event of a device that is as far behind as it may be. It notes what waits for it."""

    now = 0  # the step that the host issues
    waits: ClassVar[list[tuple[int, int]]] = []  # (the step that recorded it, the step that waited)

    def record(self) -> None:
        self._recorded = Event.now

    def synchronize(self) -> None:
        """Note the step, and the one that waits."""
        Event.waits.append((self._recorded, Event.now))

    def query(self) -> bool:
        """Return True: the event has passed whenever it is asked."""
        return True


class CopyFromDevice(LateCopy):
    """A copy that arrives late on a CPU too."""

    def _record(self) -> Any:
        event = Event()
        event.record()
        return event


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[list[tuple[int, int]]]:
    """Send headers the way of a GPU's, and yield the waits for them."""
    Event.now, Event.waits = 0, []
    late = mock.patch.object(GatherStatus, "reads_late", staticmethod(lambda headers: True))
    with late, mock.patch.object(gather_status, "LateCopy", CopyFromDevice):
        yield Event.waits


@pytest.mark.parametrize(
    ("optimizer", "parts", "reshard"),
    [("FusedAdamW", 1, True), ("FusedAdamW", 3, True), ("AdamW", 1, False), models.slow("8-bit moments", 1, True)],
)
@on_ranks(3)
def test_nothing_waits_for_its_own_step(optimizer: str, parts: int, reshard: bool) -> None:
    """No step waits for itself over five steps of `parts` backward passes. The last one moves nothing to the host."""
    with as_on_a_gpu() as waits:
        model = models.sharded(Net(FORMATS, 64, 96), reshard_after_forward=reshard)
        steps = models.OPTIMIZERS[optimizer](model)
        traffic = HostTraffic()
        for Event.now in range(5):
            with traffic if Event.now == 4 else contextlib.nullcontext():
                for part in range(parts):
                    x = models.batch(parts * Event.now + part, 64)
                    model(x).float().square().mean().backward()
                steps.step()
                steps.zero_grad()
        assert traffic.found == [] or optimizer == "AdamW"  # whose step numbers are on the CPU
        assert {waited for _, waited in waits} == {1, 2, 3, 4}
        assert all(waited - recorded in (1, 2) for recorded, waited in waits)
        models.check(model, "trained")


def step(model: Any, optimizer: Any, number: int) -> None:
    """Take a step. A pass in which one rank raises breaks off on all."""
    models.train(model, optimizer, range(number, number + 1), 64)


READERS: dict[str, Callable[[Any, Any], object]] = {
    "a step": lambda model, optimizer: step(model, optimizer, 3),
    "an evaluation": lambda model, optimizer: models.forward(model, 7),
    "state_dict": lambda model, optimizer: model.state_dict(),
    "a training state": lambda model, optimizer: TrainingState(model, optimizer).state_dict(),
    "delayed scaling": lambda model, optimizer: zerocast.fsdp2.state_dict(model),
    "verify": lambda model, optimizer: zerocast.verify(model),
}


@pytest.mark.parametrize("reader", READERS)
@on_ranks(3)
def test_a_disagreement_reaches_all_ranks_a_step_later(reader: str) -> None:
    """A step in which ranks disagree does not raise. The reader after it does, and no reader after a load."""
    with as_on_a_gpu():
        model = models.sharded(Net(FORMATS, 64, 96))
        steps = models.OPTIMIZERS["FusedAdamW" if reader == "a step" else "AdamW"](model)
        step(model, steps, 0)
        state = copy.deepcopy(TrainingState(model, steps).state_dict())
        calls = [lambda: step(model, steps, 1), lambda: READERS[reader](model, steps)]
        calls += [lambda: TrainingState(model, steps).load_state_dict(state), calls[1]]
        if dist.get_rank() == 1:
            write_data(model)
        during, after, *loaded = map(error_of, calls)
        assert "was changed on ranks [1] of its shard group and not on ranks [0, 2]" in after
        assert [during, *loaded] == ["", "", ""]
        models.check(model, "loaded")


def unfit_checkpoint(model: Any, optimizer: Any, folder: str) -> None:
    optim.load(TrainingState(model, optimizer), folder)


def unfit_masters(model: Any, optimizer: Any, folder: str) -> None:
    zerocast.fsdp2.load_masters(model, {})


@on_ranks(2)
def test_a_load_that_is_refused_leaves_a_disagreement(tmp_path: Path) -> None:
    """A load that does not fit raises, and the disagreement before it still reaches the next reader."""
    folder = str(tmp_path / "other")
    with as_on_a_gpu():
        smaller = models.sharded(Net(FORMATS, 32, 64))
        optim.save(TrainingState(smaller, FusedAdamW(smaller.parameters())), folder)
        for refused in (unfit_checkpoint, unfit_masters):
            model = models.sharded(Net(FORMATS, 64, 96))
            optimizer = FusedAdamW(model.parameters(), lr=1e-2)
            zerocast.fsdp2.refresh(model)
            if dist.get_rank() == 1:
                write_data(model)
            step(model, optimizer, 0)
            assert "ValueError" in error_of(partial(refused, model, optimizer, folder))
            assert "was changed on ranks [1] of its shard group and not on ranks [0]" in error_of(model.state_dict)


def is_refused(model: Any) -> bool:
    """Return whether a forward pass says that one rank's masters were changed."""
    return "was changed on ranks" in error_of(lambda: model(models.batch(0, 64)))


@on_ranks(2)
def test_a_loop_without_steps_is_told_too() -> None:
    counts = []
    for grad in (True, False):
        with as_on_a_gpu(), torch.set_grad_enabled(grad):
            model = models.sharded(Net(FORMATS, 64, 96))
            zerocast.fsdp2.refresh(model)
            if dist.get_rank() == 1:
                write_data(model)
            counts.append(next(count for count in range(50) if is_refused(model)))
    assert counts == [MAX_PASSES, 0]


def test_the_end_of_a_process_reports_what_is_unread(caplog: pytest.LogCaptureFixture) -> None:
    agreed = torch.tensor([[0, 7], [2, 7]], dtype=torch.int32)
    written = torch.tensor([[0, 7], [1, 7]], dtype=torch.int32)
    with as_on_a_gpu():
        fine, wrong = GatherStatus(Validity()), GatherStatus(Validity())
        for status, headers in ((fine, agreed), (wrong, written)):
            status.note(("a", "b"), torch.cat([agreed, headers]))
        with caplog.at_level(logging.ERROR):
            gather_status._report_unread()
            gather_status._report_unread()
    (record,) = caplog.records
    assert "process ended: b: the master, or a plain parameter" in record.getMessage()
