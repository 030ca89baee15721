"""LateCopy: a copy of numbers from the device that the host reads one call later, so that it never
waits for work that it has just issued.
"""

import torch
from torch import Tensor


class LateCopy:
    """A copy on the host of the tensor `numbers`, which has a fixed address.

    Attributes:
        is_late: True on a GPU: a copy to pinned memory is queued behind the work that was issued
            before it, and is read at the host's next call. On a CPU a copy is complete at once.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self.is_late = numbers.is_cuda
        self._is_sent = False
        # A copy to memory that is not pinned would make the host wait.
        self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=self.is_late)
        self._arrived = torch.cuda.Event() if self.is_late else None

    def send(self) -> None:
        """Start the copy. An earlier copy that was not read is overwritten."""
        self._copy.copy_(self._numbers, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        self._is_sent = True

    def take(self) -> Tensor | None:
        """The copy that was sent last, or None if it was taken already or none was sent. Waits for
        the device to complete it.
        """
        if not self._is_sent:
            return None
        self._is_sent = False
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy

    def forget(self) -> None:
        """Drop a copy that was sent and not taken."""
        self._is_sent = False
