"""All-gathers beside the forward pass change no bit, however late they are."""

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import zerocast
from tests import casts
from tests.devices import gpus
from tests.fsdp2 import models
from tests.optim.faults import late_gathers
from tests.optim.probe import MIXED
from tests.optim.runs import ADAM, DETERMINISTIC, Run, Trainer, weight_bytes
from zerocast import ZeroAdamW, ZeroConfig
from zerocast.optim.gather import ReadyEvent

pytestmark = gpus(2)
EAGER = {"rank order": DETERMINISTIC, "library order": ZeroConfig(bucket_size=4096)}


def trained(config: ZeroConfig, late: bool, steps: int = 10) -> dict[str, Any]:
    """Return this rank's losses and every byte of its weights after the last step. Each all-gather is late if `late`."""
    net = models.Net(models.FORMATS, 64, 96).to(models.place(), torch.bfloat16)
    model = zerocast.quantize_(net, zerocast.Recipe(net.recipe))
    with late_gathers() if late else contextlib.nullcontext([1]) as delayed:
        optimizer = ZeroAdamW(model.named_parameters(), **ADAM, config=config)
        losses = []
        for step in range(steps):
            loss = model(models.batch(step, 64).bfloat16()).float().square().mean()
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found = {f"{n} {b}": values for n, held in weight_bytes(model).items() for b, values in held.items()}
    assert delayed, "no all-gather was asynchronous"
    return found | {"losses": casts.raw(torch.stack(losses))}


@pytest.mark.parametrize("config", EAGER.values(), ids=EAGER)
def test_losses_and_bytes_are_those_without(gpu_ranks, config):
    overlap = dataclasses.replace(config, overlap_all_gather=True)
    eager = gpu_ranks(2)(trained, config, False, timeout=120.0)
    for late in (False, True):
        found = gpu_ranks(2)(trained, overlap, late, timeout=120.0)
        for rank in range(2):
            casts.assert_same_bytes(found[rank], eager[rank], f"rank {rank}, late {late}")
    losses = [held["losses"].view(np.float32) for held in eager]
    assert not np.array_equal(*losses), "each rank has inputs of its own"
    assert all(held[-1] < held[0] for held in losses), "and it learns"


OVERLAP = dataclasses.replace(DETERMINISTIC, overlap_all_gather=True, keep_columnwise=True)
TRANSPOSED = ("mx", "nv", "block")  # their copies are made by whoever reads first
WARM = 3  # steps: kernels are loaded, tables stay where they are, and nothing makes the host wait
BUSY = 6_000_000_000  # cycles, about three seconds: longer than a host that other tests keep busy takes


def read_second(weights: list[Any], found: list[torch.Tensor], stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Copy the columnwise bytes of weights on a stream; the event that follows."""
    with torch.cuda.stream(stream):
        for weight, out in zip(weights, found, strict=True):
            out.copy_(weight.columnwise_data)
        return stream.record_event()


def passes_first(event: torch.cuda.Event, other: torch.cuda.Event) -> bool:
    """Return whether an event passes while the other one has not."""
    while not event.query():
        if other.query():
            return False
    return not other.query()


def second_reader(is_guarded: bool) -> tuple[bool, bool, bool]:
    """Keep the first reader's stream busy ahead of its copies. Return whether the host waited for them,
    whether a second thread on another stream read before they were there, and whether it read the right
    bytes.
    """
    trainer = Trainer(Run(MIXED, config=OVERLAP, device="cuda"))
    weights: list[Any] = [trainer.probe.get_parameter(name) for name in TRANSPOSED]
    for step in range(WARM):
        trainer.step(step)
        weight_bytes(trainer.probe)
    found = [torch.empty_like(weight.columnwise_data) for weight in weights]
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    read_second(weights, found, second)
    trainer.step(WARM)
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(BUSY)
        for weight in weights:
            _ = weight.rowwise_data
        made = first.record_event()
    unguarded = mock.patch.object(ReadyEvent, "follow", return_value=True)
    with contextlib.nullcontext() if is_guarded else unguarded, ThreadPoolExecutor(1) as pool:
        read = pool.submit(read_second, weights, found, second).result()
    host_waited, early = made.query(), passes_first(read, made)
    torch.cuda.synchronize()
    is_right = all(torch.equal(out, weight.columnwise_data) for weight, out in zip(weights, found, strict=True))
    dist.barrier()
    return host_waited, early, is_right


def test_a_second_reader_on_another_stream_waits(gpu_ranks):
    """CUDA events show that the second reader waits with the guard, and only then. How long kernels take makes no difference."""
    assert gpu_ranks(2)(second_reader, True) == [(False, False, True)] * 2
    assert gpu_ranks(2)(second_reader, False) == [(False, True, False)] * 2
