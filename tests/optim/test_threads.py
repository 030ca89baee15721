"""Several threads read weights whose gather is in flight: every one of them waits, and gets the bytes of the step."""

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import casts
from tests.optim.probe import MIXED
from tests.optim.runs import OVERLAP, Run, Trainer, weight_bytes
from tests.workers import error_of, on_ranks
from zerocast import ZeroAdamW
from zerocast.distributed.group import Group
from zerocast.optim import gather as gathers

SPECS = tuple(spec for spec in MIXED if spec.name in ("mx", "nv", "block", "norm"))
KEPT = dataclasses.replace(OVERLAP, keep_columnwise=True)
QUANTIZED = ("mx", "nv", "block")


class Held:
    """A gather that lands a while after somebody began to wait; the first waits fail, if so told."""

    def __init__(self, land: Any, failures: list[int]) -> None:
        self._land, self._failures = land, failures

    def wait(self) -> None:
        """Land 0.2 s later, or fail as often as it was told."""
        time.sleep(0.2)
        if self._failures:
            self._failures.pop()
            raise RuntimeError("a rank died")
        self._land()


def late(failures: list[int]) -> Any:
    """`Group.all_gather_into`, whose result lands when it is waited for, and late."""
    gather = Group.all_gather_into

    def call(group: Group, out: torch.Tensor, part: torch.Tensor, async_op: bool = False, what: str = "") -> Any:
        arriving = out.clone()
        gather(group, arriving, part.clone())
        return Held(lambda: out.copy_(arriving), failures if out.dtype == torch.uint8 else [])

    return call


def read(probe: torch.nn.Module, name: str, direction: str, barrier: threading.Barrier) -> Any:
    barrier.wait()
    return casts.raw(getattr(probe.get_parameter(name), direction)).copy()


@pytest.mark.parametrize("failing", [False, True])
@on_ranks(2)
def test_every_thread_waits(failing: bool) -> None:
    """Six threads read three weights in both directions at once. One of them hears of a failure, and those that waited behind
    it try again.
    """
    eager = Trainer(Run(SPECS))
    eager.step(0)
    before, failures = Group.all_gather_into, []
    trainer = Trainer(Run(SPECS, config=KEPT))
    Group.all_gather_into = late(failures)  # type: ignore[method-assign]
    try:
        trainer.step(0)
        failures += [1] if failing else []
        jobs = [(name, direction) for name in QUANTIZED for direction in ("rowwise_data", "columnwise_data")] * 2
        barrier, said = threading.Barrier(len(jobs)), []
        with ThreadPoolExecutor(len(jobs)) as pool:
            futures = [pool.submit(read, trainer.probe, *job, barrier) for job in jobs]
        wanted = weight_bytes(eager.probe)
        for (name, direction), future in zip(jobs, futures, strict=True):
            error = future.exception()
            if error is not None:
                said.append(str(error))
                continue
            casts.assert_same_bytes({direction: future.result()}, {direction: wanted[name][direction]}, name)
        for name, bytes_ in wanted.items():
            casts.assert_same_bytes(weight_bytes(trainer.probe)[name], bytes_, f"{name}, read again")
    finally:
        Group.all_gather_into = before  # type: ignore[method-assign]
    trainer.step(1)
    dist.barrier()
    assert said == (["a rank died"] if failing else [])


@pytest.mark.notices(
    "a thread computes with weights while another one steps",
    where="ZeroAdamW",
    answer="raises; reads during a gather wait",
)
@on_ranks(2)
def test_a_thread_that_reads_within_a_step():
    """A thread computes with a weight within a cast, and one reads all weights while the first gather begins; what the former
    says.
    """
    eager = Trainer(Run(SPECS))
    eager.step(0)
    trainer, begin = Trainer(Run(SPECS, config=KEPT)), late([])
    reduce, futures = Group.all_reduce_max, []
    with ThreadPoolExecutor(2) as pool:

        def reducing(*args: Any) -> None:
            if args[-1] == "the packed amaxes of a cast":
                futures.append(pool.submit(error_of, trainer.probe.get_parameter("nv").dequantize))
                futures[0].result()
            reduce(*args)

        def gathering(*args: Any, **kwargs: Any) -> Any:
            work = begin(*args, **kwargs)
            if len(futures) == 1 and kwargs["what"].startswith("weight bytes"):
                futures.append(pool.submit(weight_bytes, trainer.probe))
                time.sleep(0.1)
            return work

        reduced = mock.patch.object(Group, "all_reduce_max", reducing)
        with reduced, mock.patch.object(Group, "all_gather_into", gathering):
            trainer.step(0)
        wanted, found = weight_bytes(eager.probe), futures[1].result()
        for name in QUANTIZED:
            casts.assert_same_bytes(found[name], wanted[name], name)
    said = futures[0].result()
    assert "another thread is in the middle of an optimizer step" in said


class Stream:
    """What of a CUDA stream is used, on a CPU."""

    current: "Stream"

    def __init__(self) -> None:
        self.device, self.waits = torch.device("cuda", 0), 0

    def wait_event(self, event: Any) -> None:
        self.waits += 1


class Event:
    """An event that has not passed, until it is told so."""

    passed = False

    def record(self, stream: Stream) -> None:
        """An event that a stub records holds nothing."""

    def query(self) -> bool:
        return Event.passed


def test_a_second_stream_waits_too(monkeypatch):
    """The host's part on a GPU: each other stream is made to wait until the bytes are there for all."""
    first, second = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream.current)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    Stream.current = first
    arrival = gathers.ReadyEvent.now(torch.device("cuda", 0))
    assert arrival is not None
    trainer = Trainer(Run(SPECS, config=KEPT))
    flight = trainer.optimizer._weights.gather
    monkeypatch.setattr(gathers.ReadyEvent, "now", staticmethod(lambda device: gathers.ReadyEvent(device)))
    trainer.step(0)
    weight = trainer.probe.get_parameter("nv")
    _ = weight.rowwise_data
    assert first.waits == 0
    Stream.current = second
    _ = weight.rowwise_data
    assert (first.waits, second.waits) == (0, 1)
    Event.passed = True
    for name in QUANTIZED:
        _ = trainer.probe.get_parameter(name).rowwise_data
    Stream.current = first
    _ = trainer.probe.get_parameter("norm")
    assert [len(flight._ready_events), trainer.optimizer._weights.driver.plan.validity.before_read is None] == [0, True]


def test_a_gather_that_another_thread_completes_between_two_looks():
    weight, waited = casts.cast_whole("nvfp4", torch.randn(32, 32)), []
    looks = iter([waited.append, None])
    weight.state.validity = type("Landing", (), {"before_read": property(lambda self: next(looks))})()
    weight.wait()
    assert len(waited) == 1
    assert waited[0] is weight


def test_two_backward_passes_at_once():
    """One thread's backward pass waits between two gradients for the whole of another's."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    optimizer = ZeroAdamW(model.named_parameters())
    loss, said = model(torch.ones(2, 16)).sum(), []
    other_loss = model(torch.ones(2, 16)).sum()

    def backward(loss: torch.Tensor) -> None:
        try:
            loss.backward()
        except RuntimeError as error:
            said.append(str(error))

    def meanwhile(_: torch.Tensor) -> None:
        handle.remove()
        thread = threading.Thread(target=backward, args=(other_loss,))
        thread.start()
        thread.join()

    handle = model[0].weight.register_post_accumulate_grad_hook(meanwhile)
    backward(loss)
    assert said[0].startswith("two threads run backward passes")
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\) of the optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
