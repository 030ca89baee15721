"""A training process under Apex's optimizer that may die where it is told to: for tests of what becomes of the other."""

from typing import Any

from tests.apex.host_on_cpu import WHY_NOT, host_on_cpu
from tests.apex.training import Run
from tests.hosts.apex import CASE
from tests.nccl.dying import die, enter, leave
from zerocast.distributed.group import Group

if not WHY_NOT:
    from tests.apex.host_on_cpu import apex

PLACES = ("reduce-scatter", "all-reduce", "all-gather")  # of gradients, of a cast, of the bytes


def train(rank: int, backend: str, store: str, place: str, timeout: float) -> None:
    """Three steps on one of two ranks; rank 1 dies in the second one, before a collective of `PLACES`.

    Each step ends as a logged one does, with the host waiting for the device. Errors end the process as they would a user's.
    """
    device = enter(rank, backend, store, timeout)
    with host_on_cpu():
        run = Run(CASE)
        for number in range(3):
            if rank == 1 and number == 1 and place in PLACES:
                owner, name = _collectives()[place]
                setattr(owner, name, lambda *_, **__: die(device))
            run.step(number)
            run.wrong()  # waits for all of it
    leave(device)


def _collectives() -> dict[str, tuple[Any, str]]:
    return {
        "reduce-scatter": (apex, "reduce_scatter_tensor"),
        "all-reduce": (Group, "all_reduce_max"),
        "all-gather": (apex, "all_gather_into_tensor"),
    }
