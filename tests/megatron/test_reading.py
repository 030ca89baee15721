"""Whoever reads a weight waits for its gather, also as the second thread that does."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any
from unittest import mock

import pytest
import torch

import zerocast
from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.ranks_host import host
from tests.megatron.training import METADATA, MIXED, Attached, Case
from tests.workers import error_of, on_ranks
from zerocast import QuantizedWeight
from zerocast.cast.columnwise import ColumnwiseCopies
from zerocast.integrations.megatron import dequantize_
from zerocast.integrations.megatron.host import distributed_optimizers
from zerocast.integrations.megatron.shards import shares

SECONDS = 0.1  # in which a reader that does not wait has read


class _Held:
    """A place at which the first reader is held until it is released."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Event(), threading.Event()

    def hold(self) -> None:
        self.reached.set()
        assert self.released.wait(20)


class _Slow:
    """A gather that takes its time, or dies."""

    def __init__(self, handle: Any, held: _Held, dies: bool) -> None:
        self._handle, self._held, self._dies = handle, held, dies

    def wait(self) -> None:
        self._held.hold()
        self._handle.wait()
        if self._dies:
            raise RuntimeError("injected")


def read(attached: Attached, weight: QuantizedWeight, columnwise: bool, by_host: bool) -> Any:
    """What is read of a weight, or the error. With `by_host` the host finishes the gathers before, as in a forward pass."""
    for group in attached.run.ddp.bucket_groups if by_host else ():
        group.finish_param_sync(skip_next_bucket_dispatch=True)
    try:
        return weight.read(columnwise, torch.float32)
    except RuntimeError as error:
        return str(error)


def read_twice(dies: bool, columnwise: bool, second_in: str, by_host: bool = False) -> list[Any]:
    """What two threads read of a weight. The second one begins while the first is in the gather or in the copies after it, and must
    not have read before the first goes on. What is read without an error is what is there afterwards.
    """
    with host():
        attached = Attached(Case(MIXED, overlap=True))
        attached.run.step(0)
        weight = next(w for w in attached.run.weights.values() if isinstance(w, QuantizedWeight))
        held = {"gather": _Held(), "copies": _Held()}
        for group in attached.run.ddp.bucket_groups:
            if not group.param_gather_dispatched or group.param_gather_handle is None:
                group.start_param_sync()
            group.param_gather_handle = _Slow(group.param_gather_handle, held["gather"], dies)

        def slowed(copies: Any, make: Callable[[Any], None] = ColumnwiseCopies.make) -> None:
            held["copies"].hold()
            make(copies)

        with mock.patch.object(ColumnwiseCopies, "make", slowed), ThreadPoolExecutor(2) as threads:
            first, second = threads.submit(read, attached, weight, columnwise, by_host), None
            for place, one in held.items():
                if not dies or place == "gather":
                    assert one.reached.wait(20)
                if place == second_in:
                    second = threads.submit(read, attached, weight, columnwise, False)
                    assert not wait([first, second], SECONDS).done
                one.released.set()
            assert second is not None
            found = [first.result(), second.result()]
        if not dies:
            attached.run.force_sync()
            expected = weight.read(columnwise, torch.float32)
            assert all(isinstance(value, torch.Tensor) and torch.equal(value, expected) for value in found)
        return found


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


@pytest.mark.notices(
    "weights are read or saved between a step and its gather (overlap_param_gather)",
    where="Megatron",
    answer="raises, and names the call that gathers; tensors of TransformerEngine are read",
)
@on_ranks(2)
@host()
def test_weights_are_not_read_before_their_gather() -> None:
    """With overlap the next forward pass gathers, and a rank has its own part of the new bytes until then."""
    run = Attached(Case(MIXED, overlap=True)).run
    run.step(0)
    run.step(1)
    weight, entries = run.weights["layers.0.weight"], run.ddp.module.sharded_state_dict(metadata=METADATA)
    with torch.no_grad():
        for use in (weight.dequantize, lambda: torch.ones(1, 64).bfloat16() @ weight.t(), lambda: dequantize_(entries)):
            assert "part of the last cast only: with overlap_param_gather" in error_of(use)
    # What overwrites a weight may come before its gather.
    values = {name: torch.randn(p.shape).bfloat16() for name, p in run.weights.items()}
    run.ddp.module.load_state_dict(values, strict=False)
    run.step(2)
    run.force_sync()
    assert run.stale_bytes() == {}


@on_ranks(2)
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("second_in", ["gather", "copies"])
@pytest.mark.parametrize("by_host", [False, True], ids=["reader", "host"])
def test_the_second_reader_waits_too(by_host: bool, columnwise: bool, second_in: str) -> None:
    read_twice(False, columnwise, second_in, by_host)


@on_ranks(2)
def test_the_second_reader_raises_where_the_first_does() -> None:
    first, second = read_twice(True, False, "gather")
    assert "injected" in first and "an all-gather failed partway" in second


@on_ranks(2)
@host()
def test_a_forward_pass_before_a_step_is_not_the_gather_after_it() -> None:
    """Megatron alone then computes with stale weights, since the forward pass has gathered."""
    run = Attached(Case(MIXED, overlap=True)).run
    run.forward_and_backward(0)
    with torch.no_grad():
        run.ddp(torch.ones(8, 64).bfloat16())
    run.optimizer.step()
    run.forward(1)
    assert run.stale_bytes() == {}
