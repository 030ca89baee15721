"""Faults that a test injects: memory that runs out at one operator of many, in this process."""

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


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
