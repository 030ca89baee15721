"""All-gathers that really are in flight: nothing lands before it is waited for."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from zerocast.distributed.group import Group


class Slow:
    """A collective whose result lands when it is waited for."""

    def __init__(self, land: Callable[[], object]) -> None:
        self._land = land

    def wait(self) -> None:
        self._land()


@contextlib.contextmanager
def slow_gathers(seconds: float = 0.0, failures: list[int] | None = None) -> Iterator[list[int]]:
    """While the context is open, asynchronous all-gathers land when waited for, so many seconds
    after the wait began; gives the bytes of those that have. The first waits fail, one for each of
    the `failures`, which may be added later.
    """
    gather = Group.all_gather_into
    landed: list[int] = []

    def later(group: Group, out: Tensor, part: Tensor, async_op: bool = False, what: str = "") -> Any:
        if not async_op:
            return gather(group, out, part)
        arriving = out.clone()
        work = gather(group, arriving, part.clone(), async_op=True)

        def land() -> None:
            time.sleep(seconds)
            if work is not None:
                work.wait()
            if failures:
                failures.pop()
                raise RuntimeError("a rank died")
            out.copy_(arriving)
            landed.append(out.nbytes)

        return Slow(land)

    with mock.patch.object(Group, "all_gather_into", later):
        yield landed


@contextlib.contextmanager
def late_gathers(cycles: int = 4_000_000) -> Iterator[list[int]]:
    """While the context is open, on a GPU, asynchronous all-gathers begin some milliseconds after
    they are called; gives the bytes of each.

    Other kernels run meanwhile: what reads without having waited reads what was there before.
    """
    gather, late = Group.all_gather_into, torch.cuda.Stream()
    delayed: list[int] = []

    def later(group: Group, out: Tensor, part: Tensor, async_op: bool = False, what: str = "") -> Any:
        if not async_op:
            return gather(group, out, part, what=what)
        late.wait_stream(torch.cuda.current_stream())
        delayed.append(out.nbytes)
        with torch.cuda.stream(late):  # whose kernels NCCL waits for
            torch.cuda._sleep(cycles)
            return gather(group, out, part, async_op=True, what=what)

    with mock.patch.object(Group, "all_gather_into", later):
        yield delayed
