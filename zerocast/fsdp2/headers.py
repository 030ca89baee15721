"""Headers: what all ranks said of the bytes that a GPU has gathered, on their way to the host.

The host does not wait for what it has just issued, or prefetching would be in vain. So ranks that disagree raise later than on a
CPU, and all of them at the same place of the program: before a gather that none of them takes part in.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

UNREAD = 2  # gathers whose headers may still be on their way when the next one is issued


class Speaker(Protocol):
    """A weight, or several that were asked about together."""

    def check(self, headers: Tensor) -> None:
        """RuntimeError if int32 headers `[world, 2]`, or `[world * weights, 2]`, say that ranks disagree."""


@dataclass
class Batch:
    """The headers of one gather, in pinned memory once `arrived`."""

    speakers: list[Speaker]
    headers: list[Tensor]
    arrived: torch.cuda.Event

    def check(self) -> None:
        """Wait, and let every weight look at its own."""
        self.arrived.synchronize()
        for speaker, headers in zip(self.speakers, self.headers, strict=True):
            speaker.check(headers)


@dataclass
class Headers:
    """Of the gathers of one model, in their order; every weight of a gather is sent before the first of it is received."""

    _speakers: list[Speaker] = field(default_factory=list, init=False)
    _here: list[Tensor] = field(default_factory=list, init=False)  # on the GPU, of the gather that is being received
    _batches: deque[Batch] = field(default_factory=deque, init=False)
    _stream: torch.cuda.Stream | None = field(default=None, init=False)
    _ready: torch.cuda.Event | None = field(default=None, init=False)  # the last of them is there

    def note(self, speaker: Speaker, headers: Tensor) -> None:
        """Keep a copy of what was gathered for a weight, on the current stream: FSDP2 may free it before it is read."""
        self._speakers.append(speaker)
        self._here.append(headers.clone())
        self._ready = self._ready or torch.cuda.Event()
        self._ready.record()

    def check(self, leave: int = 0) -> None:
        """RuntimeError, on every rank, where those of all gathers but the last `leave` say that ranks disagree."""
        if self._here:
            self._send()
        while len(self._batches) > leave:
            try:
                self._batches.popleft().check()
            except RuntimeError:
                self._batches.clear()  # of the same disagreement
                raise

    def _send(self) -> None:
        """To the host, on a stream of their own: computing goes on behind the gather."""
        assert self._ready is not None
        self._stream = self._stream or torch.cuda.Stream(self._here[0].device)
        self._stream.wait_event(self._ready)
        with torch.cuda.stream(self._stream):
            flat = torch.cat([headers.view(-1) for headers in self._here])
            pinned = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            pinned.copy_(flat, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            for headers in self._here:
                headers.record_stream(self._stream)
        sizes = [headers.numel() for headers in self._here]
        by_weight = [part.view(-1, 2) for part in pinned.split(sizes)]
        self._batches.append(Batch(self._speakers, by_weight, arrived))
        self._speakers, self._here = [], []
