"""A training process on the real host that is stopped or killed where it is told to, and what it says of that."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from tests.megatron.faulty import Attached, faulty
from tests.megatron.here import groups, host
from tests.megatron.host_on_cpu import WHY_NOT
from tests.megatron.training import MIXED, Case
from tests.workers import join

if not WHY_NOT:
    from megatron.core.distributed import param_and_grad_buffer as buffers

RANKS = 3
FAULTS = {"SIGSTOP": signal.SIGSTOP, "SIGKILL": signal.SIGKILL}
PLACES = ("forward", "gradients", "step", "all-reduce", "all-gather", "after the step")


def train(rank: int, store: str, place: str, fault: str, overlap: bool, timeout: float, said: Connection) -> None:
    """Four steps; the last rank falls in the second one. Each rank says when it fell, or when and what it raised, or None."""
    join(rank, RANKS, "gloo", store, timedelta(seconds=timeout))
    with groups(timeout), host():
        attached = Attached(Case(MIXED, overlap))
        attached.run.step(0)

        def falls() -> None:
            said.send((time.monotonic(), "falls"))
            os.kill(os.getpid(), FAULTS[fault])

        try:
            for number in (1, 2, 3):
                _step(attached, number, place, falls if rank == RANKS - 1 and number == 1 else lambda: None)
        except RuntimeError as error:
            said.send((time.monotonic(), f"{type(error).__name__}: {error}"))
        else:
            said.send((time.monotonic(), None))
    os._exit(0)


def _step(attached: Any, number: int, place: str, falls: Callable[[], None]) -> None:
    run = attached.run
    with _before(place, falls):
        if place == "forward":
            falls()
        run.forward_and_backward(number)
        if place == "step":
            falls()
        run.optimizer.step()
        if place == "after the step":
            falls()


def _before(place: str, falls: Callable[[], None]) -> AbstractContextManager[Any]:
    """Before the collective of a place; the others do nothing there but go on."""
    if place == "gradients":
        return mock.patch.object(buffers, "dist_reduce_scatter_func", _first(falls, buffers.dist_reduce_scatter_func))
    if place in ("all-reduce", "all-gather") and falls.__name__ == "falls":
        return faulty(place, falls)
    return nullcontext()


def _first(falls: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        falls()
        return then(*args, **kwargs)

    return call
