"""Whoever reads a weight waits for its gather, also as the second thread that does."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

import zerocast
from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.ranks_host import host
from tests.megatron.training import MIXED, Attached, Case
from tests.workers import Ranks, on_ranks
from zerocast import QuantizedWeight
from zerocast.cast.columnwise import ColumnwiseCopies
from zerocast.integrations.megatron.host import distributed_optimizers
from zerocast.integrations.megatron.shards import shares

SECONDS = 0.4


class _Slow:
    """A gather that takes its time, or dies."""

    def __init__(self, handle: Any, dies: bool) -> None:
        self._handle, self._dies = handle, dies

    def wait(self) -> None:
        time.sleep(SECONDS)
        self._handle.wait()
        if self._dies:
            raise RuntimeError("injected")


def read_twice(dies: bool, columnwise: bool, second_after: float, by_host: bool = False) -> list[tuple[Any, float]]:
    """What two threads read of a weight, or the error, and how long that took. The host itself may finish the gathers in the first,
    as in a forward pass. What is read without an error is what is there afterwards.
    """
    with host():
        attached = Attached(Case(MIXED, overlap=True))
        attached.run.step(0)
        weight = next(w for w in attached.run.weights.values() if isinstance(w, QuantizedWeight))
        for group in attached.run.ddp.bucket_groups:
            if not group.param_gather_dispatched or group.param_gather_handle is None:
                group.start_param_sync()
            group.param_gather_handle = _Slow(group.param_gather_handle, dies)

        def read(index: int) -> tuple[Any, float]:
            time.sleep(index * second_after)
            start = time.monotonic()
            for group in attached.run.ddp.bucket_groups if by_host and index == 0 else ():
                group.finish_param_sync(skip_next_bucket_dispatch=True)
            try:
                value: Any = weight.read(columnwise, torch.float32)
            except RuntimeError as error:
                value = str(error)
            return value, time.monotonic() - start

        slowed = mock.patch.object(ColumnwiseCopies, "make", _slowed(ColumnwiseCopies.make))
        with slowed, ThreadPoolExecutor(2) as threads:
            found = list(threads.map(read, range(2)))
        if not dies:
            attached.run.force_sync()
            expected = weight.read(columnwise, torch.float32)
            assert all(isinstance(value, torch.Tensor) and torch.equal(value, expected) for value, _ in found)
        return found


def _slowed(method: Callable[..., None]) -> Callable[..., None]:
    def call(copies: Any) -> None:
        time.sleep(SECONDS)
        method(copies)

    return call


@on_ranks(2)
@host()
def test_a_gather_in_flight_is_none_of_the_next_cast() -> None:
    """A gather that begins before a cast brings old bytes, or a mixture of both, so the bytes of
    the cast must be gathered again.
    """
    attached = Attached(Case(MIXED, overlap=True))
    attached.run.step(0)
    for group in attached.run.ddp.bucket_groups:
        group.start_param_sync()
    for inner in distributed_optimizers(attached.run.optimizer):
        for share in shares(inner):
            for _, master, _, _ in share.masters():
                master.data.mul_(2.0)
        inner._copy_main_params_to_model_params()
    is_right = zerocast.verify(attached.attachment).ok
    assert is_right and attached.run.stale_bytes() == {}


pytestmark = needs_megatron


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("second_after", [0.1, 1.5], ids=["in the gather", "in the copies"])
@pytest.mark.parametrize("by_host", [False, True], ids=["reader", "host"])
def test_the_second_reader_waits_too(ranks: Ranks, by_host: bool, columnwise: bool, second_after: float) -> None:
    for found in ranks(2)(read_twice, False, columnwise, second_after * SECONDS, by_host):
        assert all(seconds > SECONDS / 4 for _, seconds in found)


def test_the_second_reader_raises_where_the_first_does(ranks: Ranks) -> None:
    for (first, _), (second, _) in ranks(2)(read_twice, True, False, 0.1 * SECONDS):
        assert "injected" in first and "an all-gather failed partway" in second
