"""An all-gather in flight is seen by nobody: whatever reads a weight first waits, and gets the bytes that it would get without."""

import dataclasses
import io
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import casts
from tests.optim.faults import slow_gathers
from tests.optim.probe import BF16, MIXED, Probe
from tests.optim.runs import DETERMINISTIC, OVERLAP, Run, Trainer, weight_bytes
from tests.workers import error_of, on_ranks
from zerocast import ZeroAdamW, ZeroConfig
from zerocast.distributed.group import Group

KEPT = dataclasses.replace(OVERLAP, keep_columnwise=True)
QUANTIZED = ("mx", "nv", "block")
SPECS = tuple(spec for spec in MIXED if spec.name in (*QUANTIZED, "norm"))
Found = dict[str, Any]


_compiled_linear = torch.compile(nn.functional.linear, backend="aot_eager", fullgraph=True)


def data(probe: Probe) -> Found:
    return {name: casts.raw(probe.get_parameter(name).rowwise_data).copy() for name in QUANTIZED}


def columnwise(probe: Probe) -> Found:
    return {name: values["columnwise_data"] for name, values in weight_bytes(probe).items() if name in QUANTIZED}


def scales(probe: Probe) -> Found:
    return {name: casts.raw(probe.get_parameter(name).rowwise_scale_inv).copy() for name in QUANTIZED}


def saved(probe: Probe) -> Found:
    file = io.BytesIO()
    torch.save(probe.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    return {name: casts.raw(loaded[name].dequantize()) for name in QUANTIZED}


def tied_head(probe: Probe) -> Found:
    """Read a weight by a function, in training mode."""
    x = torch.ones(3, 112, dtype=BF16)
    return {"out": casts.raw(nn.functional.linear(x, probe.get_parameter("nv")))}


def compiled(probe: Probe) -> Found:
    """Read a weight by a graph of an earlier run, since tracing a graph waits, too."""
    return {"out": casts.raw(_compiled_linear(torch.ones(3, 112, dtype=BF16), probe.get_parameter("nv")).detach())}


def input_gradient(probe: Probe) -> Found:
    x = torch.ones(3, 96, dtype=BF16, requires_grad=True)
    nn.functional.linear(x, probe.get_parameter("mx")).sum().backward()
    y = torch.ones(3, 33, dtype=BF16, requires_grad=True)
    nn.functional.linear(y, probe.get_parameter("block")).sum().backward()
    return {"mx": casts.raw(x.grad), "block": casts.raw(y.grad)}


def loaded_over(probe: Probe) -> Found:
    """Load with `load_state_dict` into a weight whose gather is in flight. The loaded values must stay."""
    probe.load_state_dict(Probe(SPECS).state_dict())
    return data(probe)


def second_optimizer(probe: Probe) -> Found:
    """Build a second optimizer, whose masters start from the gathered weights."""
    ZeroAdamW(probe.named_parameters())
    return data(probe)


READS = (data, columnwise, scales, saved, tied_head, compiled, input_gradient, loaded_over, second_optimizer)


def read_in_flight(config: ZeroConfig, read: Callable[[Probe], Found], steps: int) -> Found:
    """Return what the first read after the last step sees, and the weights after one more step, which the read
    must not break.
    """
    with slow_gathers() as landed:
        trainer = Trainer(Run(SPECS, config=config))
        trainer.train(range(steps))
        before = len(landed)
        found = read(trainer.probe)
        assert len(landed) > before or not config.overlap_all_gather, "nothing was in flight"
        if read is loaded_over:  # else the step says what it would undo
            trainer.optimizer.load_state_dict(trainer.optimizer.state_to_overwrite())
        if read is not second_optimizer:
            trainer.step(steps)
        after = {f"{n} {b}": v for n, held in weight_bytes(trainer.probe).items() for b, v in held.items()}
    return {key: np.asarray(value) for key, value in {**found, **after}.items()}


@pytest.mark.parametrize(
    ("read", "config"),
    [*((read, OVERLAP) for read in READS), (columnwise, KEPT), (input_gradient, KEPT)],
    ids=lambda value: getattr(value, "__name__", ""),
)
@on_ranks(2)
def test_a_read_waits(read, config):
    for steps in (0, 2) if read is data else (2,):
        eager, overlapped = (read_in_flight(how, read, steps) for how in (DETERMINISTIC, config))
        casts.assert_same_bytes(overlapped, eager, f"after {steps} steps")


# -- several threads


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
    failures: list[int] = []
    trainer = Trainer(Run(SPECS, config=KEPT))
    with slow_gathers(0.2, failures):
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
        again = weight_bytes(trainer.probe)
        for name, bytes_ in wanted.items():
            casts.assert_same_bytes(again[name], bytes_, f"{name}, read again")
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
    """A thread that computes with a weight within a cast is refused. One that reads all weights during a gather waits."""
    eager = Trainer(Run(SPECS))
    eager.step(0)
    trainer, reduce, futures = Trainer(Run(SPECS, config=KEPT)), Group.all_reduce_max, []
    with ThreadPoolExecutor(2) as pool:

        def reducing(*args: Any) -> None:
            if args[-1] == "the packed amaxes of a cast":
                futures.append(pool.submit(error_of, trainer.probe.get_parameter("nv").dequantize))
                futures[0].result()
            reduce(*args)

        def gathering(*args: Any, **kwargs: Any) -> Any:
            work = slow(*args, **kwargs)
            if len(futures) == 1 and kwargs["what"].startswith("weight bytes"):
                futures.append(pool.submit(weight_bytes, trainer.probe))
                time.sleep(0.1)
            return work

        with slow_gathers(0.2), mock.patch.object(Group, "all_reduce_max", reducing):
            slow = Group.all_gather_into
            with mock.patch.object(Group, "all_gather_into", gathering):
                trainer.step(0)
        wanted, found = weight_bytes(eager.probe), futures[1].result()
        for name in QUANTIZED:
            casts.assert_same_bytes(found[name], wanted[name], name)
    said = futures[0].result()
    assert "another thread is in the middle of an optimizer step" in said


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
