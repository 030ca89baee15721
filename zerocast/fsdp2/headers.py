"""Headers: what all ranks said of the bytes that a GPU has gathered, on their way to the host.

The host does not wait for what it has just issued, or prefetching would be in vain. So ranks that disagree raise later than on a
CPU, and all of them at the same place of the program: before a gather that none of them takes part in.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

UNREAD = 2  # gathers whose headers may still be on their way when the next one is issued


class Speaker(Protocol):
    """A weight, or several that were asked about together."""

    def check(self, headers: Tensor) -> None:
        """RuntimeError if int32 headers `[world, 2]`, or `[world * weights, 2]`, say that ranks disagree."""


class Memory:
    """Headers of `sizes` rows on the GPU, then in pinned memory once `arrived`; every gather of the same weights uses it again."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.here = torch.empty(sum(sizes), 2, dtype=torch.int32, device=device)
        self.pinned = torch.empty(self.here.shape, dtype=self.here.dtype, pin_memory=True)
        self.by_speaker = self.pinned.split(list(sizes))
        self.arrived = torch.cuda.Event()

    def send(self, headers: Sequence[Tensor]) -> None:
        """To the host, behind what the current stream does: FSDP2 may free them before they are read."""
        torch.cat(list(headers), out=self.here)
        self.pinned.copy_(self.here, non_blocking=True)
        self.arrived.record()


@dataclass
class Headers:
    """Of the gathers of one model, in their order."""

    unread: deque[tuple["Gather", Memory]] = field(default_factory=deque, init=False)

    def check(self, leave: int = 0) -> None:
        """RuntimeError, on every rank, where those of all gathers but the last `leave` say that ranks disagree."""
        while len(self.unread) > leave:
            gather, memory = self.unread.popleft()
            try:
                gather.check(memory)
            except RuntimeError:
                self.unread.clear()  # of the same disagreement
                raise


class Gather:
    """The weights `speakers`, which are gathered together and received in this order."""

    def __init__(self, headers: Headers, speakers: Sequence[Speaker]) -> None:
        self._unread, self._speakers = headers.unread, speakers
        self._received: list[Tensor] = []
        self._free: list[Memory] = []

    def note(self, speaker: Speaker, headers: Tensor) -> None:
        """A weight was received; after the last one all headers are sent."""
        if speaker is self._speakers[0]:
            self._received.clear()  # of a gather that broke off
        self._received.append(headers)
        if speaker is not self._speakers[-1]:
            return
        memory = self._free.pop() if self._free else Memory(list(map(len, self._received)), headers.device)
        memory.send(self._received)
        self._unread.append((self, memory))

    def check(self, memory: Memory) -> None:
        """Wait, and let every weight look at its own."""
        memory.arrived.synchronize()
        for speaker, headers in zip(self._speakers, memory.by_speaker, strict=True):
            speaker.check(headers)
        self._free.append(memory)
