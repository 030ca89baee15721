"""A training process that may die where it is told to: for tests of what becomes of the others."""

import os
import resource
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from tests.optim.lm import LM, batch
from tests.optim.runs import ADAM, DETERMINISTIC
from tests.workers import join
from zerocast import ZeroAdamW
from zerocast.optim.gather import WeightGather

DIED, FINISHED = 17, 0
PLACES = ("between backward and step", "between cast and all-gather")


def train(rank: int, backend: str, store: str, place: str, timeout: float) -> None:
    """Three steps on one of two ranks; rank 1 dies in the second one, at a place of `PLACES`.

    Each step ends as a logged one does, with the host waiting for the loss. Errors end the process as they would a user's.
    """
    device = enter(rank, backend, store, timeout)
    model = LM().to(device)
    optimizer = ZeroAdamW(model.named_parameters(), **ADAM, config=DETERMINISTIC)
    for step in range(3):
        dies = rank == 1 and step == 1
        loss = model(batch(step, rank).to(device))
        loss.backward()
        if dies and place == PLACES[0]:
            die(device)
        if dies and place == PLACES[1]:
            WeightGather.start = lambda _: die(device)  # type: ignore[method-assign]
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    leave(device)


def enter(rank: int, backend: str, store: str, timeout: float) -> str:
    """Join the default group of two ranks; the device. What NCCL's watchdog ends, it ends at once."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it aborts: no time for a dump of the whole memory
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # the abort does not wait for a debugging report
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"  # nor, for a minute, for the other ranks' reports
    join(rank, 2, backend, store, timedelta(seconds=timeout))
    return "cuda" if backend == "nccl" else "cpu"


def leave(device: str) -> None:
    """The end of a run that nobody has died in."""
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    dist.destroy_process_group()


def die(device: str) -> NoReturn:
    """All that was launched before is done, so that the other rank is stopped by what comes after this place."""
    if device == "cuda":
        torch.cuda.synchronize()
    os._exit(DIED)
