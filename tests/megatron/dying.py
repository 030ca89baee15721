"""A training process on the real host that may die where it is told to: for tests of what becomes of the other."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

from tests.megatron.attached import Attached
from tests.megatron.here import groups, host
from tests.megatron.host_on_cpu import WHY_NOT
from tests.megatron.training import MIXED, Case
from tests.nccl.dying import die, enter, leave
from zerocast.distributed.group import Group

if not WHY_NOT:
    from megatron.core.distributed import param_and_grad_buffer as buffers

PLACES = ("all-reduce", "all-gather")  # of a cast, of the bytes


def train(rank: int, backend: str, store: str, place: str, timeout: float) -> None:
    """Three steps on one of two ranks; rank 1 dies in the second one, before a collective of `PLACES`.

    Each step ends as a logged one does, with the host waiting for the loss. Errors end the process as they would a user's.
    """
    device = enter(rank, backend, store, timeout)
    with groups(timeout), host():
        attached = Attached(Case(MIXED))
        for number in range(3):
            dies = rank == 1 and number == 1 and place in PLACES
            with faulty(place, lambda: die(device)) if dies else nullcontext():
                attached.run.step(number)
        attached.run.stale_bytes()  # waits for all of it
    leave(device)


def faulty(collective: str, fault: Callable[[], Any]) -> Any:
    """`fault` before the all-reduce of a cast, or before an all-gather of bytes."""
    owner, name = (Group, "all_reduce_max") if collective == "all-reduce" else (buffers, "dist_all_gather_func")
    return mock.patch.object(owner, name, side_effect=lambda *_, **__: fault())
