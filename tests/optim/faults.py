"""Faults that a test injects: memory that runs out at one operator of many, in this process."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OutOfMemory(TorchDispatchMode):
    """Within, operator number `at` raises torch.OutOfMemoryError: before it runs, or when it has done its work.

    Kernels allocate at their beginning; one that dies at the end has written and says that it did not. `count` is how many have
    run. Operators that only look, views and the like, have memory of their own as well: their Python objects.
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
