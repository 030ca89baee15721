"""LateCopy: a copy of numbers from the device that the host reads one call later, so that it never
waits for work that it has just issued.
"""

import torch
from torch import Tensor


class LateCopy:
    """Copies on the host of the tensor `numbers`, of the last two times that they were sent.

    On a GPU a copy to pinned memory is queued behind the work that was issued before it. On a CPU a
    copy is complete at once.

    Args:
        numbers: at a fixed address.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self.is_late = numbers.is_cuda
        # A copy to memory that is not pinned would make the host wait.
        self._copies = [torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=self.is_late) for _ in range(2)]
        self._arrived = [torch.cuda.Event() for _ in range(2)] if self.is_late else []
        # The copies that were sent and not taken, the oldest first.
        self._unread: list[int] = []

    def send(self) -> None:
        """Start a copy. Of those that were sent before and not taken, only the last one is kept."""
        last = self._unread[-1:]
        place = 1 - last[0] if last else 0
        self._copies[place].copy_(self._numbers, non_blocking=True)
        if self.is_late:
            self._arrived[place].record()
        self._unread = [*last, place]

    def take(self, in_flight: int = 0) -> list[Tensor]:
        """The copies that were sent and not taken, the oldest first, without the last `in_flight`.
        Waits for the device to complete them.
        """
        end = max(0, len(self._unread) - in_flight)
        places, self._unread = self._unread[:end], self._unread[end:]
        if places and self.is_late:
            self._arrived[places[-1]].synchronize()
        return [self._copies[place] for place in places]

    def forget(self) -> None:
        """Drop the copies that were sent and not taken."""
        self._unread = []
