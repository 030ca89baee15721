"""All-gathers that really are in flight: nothing lands before it is waited for."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from zerocast.group import Group


class Slow:
    """A collective whose result lands when it is waited for."""

    def __init__(self, land: Callable[[], object]) -> None:
        self._land = land

    def wait(self) -> None:
        """Let it land."""
        self._land()


@contextlib.contextmanager
def slow_gathers() -> Iterator[list[int]]:
    """Within, asynchronous all-gathers land when waited for; gives the bytes of those that have."""
    gather = Group.all_gather_into
    landed: list[int] = []

    def later(group: Group, out: Tensor, part: Tensor, async_op: bool = False) -> Any:
        if not async_op:
            return gather(group, out, part)
        arriving = out.clone()
        work = gather(group, arriving, part.clone(), async_op=True)

        def land() -> None:
            if work is not None:
                work.wait()
            out.copy_(arriving)
            landed.append(out.nbytes)

        return Slow(land)

    Group.all_gather_into = later  # type: ignore[method-assign, assignment]
    try:
        yield landed
    finally:
        Group.all_gather_into = gather  # type: ignore[method-assign]
