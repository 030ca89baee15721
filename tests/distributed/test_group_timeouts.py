"""A group that zerocast makes waits for as long as the user's group does, on every backend that it has."""

import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.optim.runs import Run, Trainer
from tests.workers import error_of, on_ranks
from zerocast import CastPlan, QuantizedWeight
from zerocast.distributed.group import Group, _timeout
from zerocast.optim import Checkpoints

TIMEOUT = 2.0  # seconds that the user asks for


def timeouts(group: Any) -> set[timedelta]:
    return {group._get_backend(device).options._timeout for device in group._device_types}


@on_ranks(2)
def test_the_timeout_is_passed_on() -> None:
    """New groups have the timeout of the group that they are made after, also one that was changed later."""
    asked = dist.new_group(timeout=timedelta(seconds=17))
    found = [timeouts(Group.of(asked).duplicate(backend).handle) for backend in (None, "gloo")]
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=19), asked)
    found = [*found, timeouts(Group.of(asked).duplicate().handle)]
    assert found == [{timedelta(seconds=seconds)} for seconds in (17, 17, 19)]


def test_a_timeout_that_cannot_be_read_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zerocast"):
        assert _timeout(mock.Mock(_device_types=[torch.device("cpu")])) is None
    assert "the timeout of the process group cannot be read" in caplog.text


def test_the_shortest_timeout_of_a_groups_backends() -> None:
    backends = {name: mock.Mock(**{"options._timeout": timedelta(seconds=s)}) for name, s in (("cpu", 5), ("cuda", 3))}
    group = mock.Mock(_device_types=[*backends], _get_backend=backends.get)
    assert _timeout(group) == timedelta(seconds=3)


@on_ranks(2)
def test_a_plan_that_a_rank_never_builds() -> None:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    if dist.get_rank() == 0:
        told = "of digests as this rank builds a CastPlan while a CastPlan is built failed on rank 0 of 2"
        with pytest.raises((RuntimeError, dist.DistError), match=told):
            CastPlan([QuantizedWeight.empty((32, 32), "nvfp4")], [None], [None], group)


@on_ranks(2)
def test_a_rank_that_never_saves(tmp_path: Path) -> None:
    """A save beside training has a group for its thread. Rank 0 waits for rank 1 until it is told."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    trainer = Trainer(Run(), group=group)
    trainer.step(0)
    dist.barrier()
    if dist.get_rank() == 0:
        start, checkpoints = time.monotonic(), Checkpoints(tmp_path / "checkpoints", asynchronous=True)
        assert error_of(lambda: (checkpoints.save(trainer.optimizer, 1), checkpoints.wait()))
        assert TIMEOUT * 0.9 <= time.monotonic() - start < TIMEOUT + 4.0
