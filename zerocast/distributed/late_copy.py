"""LateCopy: numbers of the device that the host reads one call later, so that it never waits for
what it has just issued.
"""

import torch
from torch import Tensor


class LateCopy:
    """A copy on the host of the tensor `numbers`, which has a fixed address.

    On a CPU a copy is there as soon as it is sent (`is_late` is False). On a GPU it travels to
    pinned memory behind the work that was issued before it, and is read at the host's next call.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self.is_late, self._is_sent = numbers, numbers.is_cuda, False
        self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=self.is_late)
        self._arrived = torch.cuda.Event() if self.is_late else None

    def send(self) -> None:
        """Start the copy. What was sent before and not read is overwritten."""
        self._copy.copy_(self._numbers, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        self._is_sent = True

    def take(self) -> Tensor | None:
        """The copy that was sent last, once; None if there is none. It waits for the device to
        reach the place where the copy was sent.
        """
        if not self._is_sent:
            return None
        self._is_sent = False
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy

    def forget(self) -> None:
        """Take nothing that was sent so far."""
        self._is_sent = False
