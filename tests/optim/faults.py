"""Faults that a test injects in this process: memory that runs out at one of many operators, all-gathers that land late or fail."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zerocast.distributed.group import Group


class OutOfMemory(TorchDispatchMode):
    """While the mode is active, operator number `at` raises torch.OutOfMemoryError, before it runs
    or after it has run.

    An operator that raises after it has run has written its results although it reports an error.
    `count` is the number of operators that have run. Views are included, because their Python
    objects need memory too.
    """

    def __init__(self, at: int, afterwards: bool = False) -> None:
        super().__init__()
        self.count, self._at, self._afterwards = 0, at, afterwards

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count operators; raise at the chosen one."""
        if func.namespace == "profiler":  # around each step, by torch
            return func(*args, **(kwargs or {}))
        dies, self.count = self.count == self._at, self.count + 1
        if dies and not self._afterwards:
            raise torch.OutOfMemoryError(f"injected before {func}")
        result = func(*args, **(kwargs or {}))
        if dies:
            raise torch.OutOfMemoryError(f"injected after {func}")
        return result


class Places(OutOfMemory):
    """While the context is open, nothing fails; `places` are the operators, in order, each with the
    lines of code that have called it.
    """

    def __init__(self) -> None:
        super().__init__(-1)
        self.places: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note where each operator is called from."""
        before = self.count
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.count > before:
            self.places.append(hash((func, *_lines())))
        return result


def _lines() -> list[tuple[Any, int]]:
    frame, found = sys._getframe(2), []
    while frame is not None:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return found


def of_each_place(places: list[int]) -> list[int]:
    """Return the first, the middle and the last operator of each place. Parameters take turns in a loop, so
    all loops are begun, half done and all but done.
    """
    numbers: dict[int, list[int]] = {}
    for number, place in enumerate(places):
        numbers.setdefault(place, []).append(number)
    return sorted({at[which] for at in numbers.values() for which in (0, len(at) // 2, -1)})


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
