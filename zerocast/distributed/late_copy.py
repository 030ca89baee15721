"""LateCopy: a copy of numbers from the device that the CPU reads one call later, so that it never
waits for work that it has just issued. LateCopies: repeated copies of one tensor.
"""

import torch
from torch import Tensor


class LateCopy:
    """A copy of the tensor `numbers` as they are now, in CPU memory.

    On a GPU it is queued behind the work that was issued before it, and `numbers` are kept until it
    is read. On a CPU it is complete immediately.

    Args:
        numbers: the tensor.
        memory: takes the copy. None for new memory.
    """

    def __init__(self, numbers: Tensor, memory: Tensor | None = None) -> None:
        self._numbers = numbers
        self._copy = cpu_memory(numbers) if memory is None else memory
        self._copy.copy_(numbers, non_blocking=True)
        self._arrived = self._record()

    def _record(self) -> torch.cuda.Event | None:
        """Return an event behind the copy; None if it is complete."""
        if not self._numbers.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @property
    def has_arrived(self) -> bool:
        """True once reading it waits for nothing."""
        return self._arrived is None or bool(self._arrived.query())

    def read(self) -> Tensor:
        """Return the copy. Waits for the device to complete it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy


class LateCopies:
    """The last two copies of the tensor `numbers` that were sent, in memory that is used again.

    Args:
        numbers: at a fixed address.

    Attributes:
        unread: the copies that were sent and not taken, the oldest first, each with its index in
            the memory that takes copies.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._memory = [cpu_memory(numbers) for _ in range(2)]
        self.unread: list[tuple[int, LateCopy]] = []

    def send(self) -> None:
        """Start a copy. Of those that were sent before and not taken, only the last one is kept."""
        last = self.unread[-1:]
        place = 1 - last[0][0] if last else 0
        self.unread = [*last, (place, LateCopy(self._numbers, self._memory[place]))]

    def pop(self, in_flight: int = 0) -> list[Tensor]:
        """Return the copies that were sent and not taken, the oldest first, without the last
        `in_flight`. Waits for the device to complete them.
        """
        end = max(0, len(self.unread) - in_flight)
        taken, self.unread = self.unread[:end], self.unread[end:]
        return [copy.read() for _, copy in taken]

    def peek(self) -> list[Tensor]:
        """Return the copies that `pop()` would return, without removing them. Waits for the
        device.
        """
        return [copy.read() for _, copy in self.unread]

    def forget(self) -> None:
        """Drop the copies that were sent and not taken."""
        self.unread = []


def cpu_memory(numbers: Tensor) -> Tensor:
    """Return memory for a copy. A copy from a GPU to memory that is not pinned would make the CPU
    wait.
    """
    return torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
