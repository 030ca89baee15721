"""WeightGather: the all-gathers of weight buffers, bucket by bucket.

The gather of a plain parameter ends inside the step, since reads of it cannot be intercepted. With
overlap, the gather of a QuantizedWeight continues until the weight is first read, by a forward
pass, a tied head, state_dict or an evaluation. Threads may read at the same time. Each of them
waits, and on a GPU each on its own stream.
"""

import contextlib
from collections.abc import Sequence

import torch

from zerocast.cast.columnwise import ColumnwiseCopies
from zerocast.cast.host import Gather
from zerocast.cast.plan import CastPlan
from zerocast.cast.tables import WeightTable
from zerocast.distributed.group import Group
from zerocast.optim.bucket_bytes import BucketBytes
from zerocast.weight import QuantizedWeight
from zerocast.weight.validity import Validity, debugging


class ReadyEvent:
    """The moment at which the bytes of a bucket have arrived on a GPU.

    A reader on a stream other than the one that waited for the gather waits for this event.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._event = torch.cuda.Event()
        self._event.record(self._stream)

    @staticmethod
    def now(device: torch.device) -> "ReadyEvent | None":
        """Return an event for the current moment. None on a CPU, where a thread that waited has the
        bytes, and inside a CUDA graph, which waits for all streams at both ends.
        """
        outside = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        return ReadyEvent(device) if outside else None

    def follow(self) -> bool:
        """Let the current stream wait. Returns True if the bytes are there for all streams."""
        if torch.cuda.is_current_stream_capturing():
            return False
        current = torch.cuda.current_stream(self._stream.device)
        if current != self._stream:
            current.wait_event(self._event)
        return bool(self._event.query())


class WeightGather(Gather):
    """All-gathers the buckets after a cast and makes columnwise copies.

    Buckets of plain parameters come first, since the step waits for their gathers, then the others
    in the order of the forward pass.

    Args:
        buffers: the buckets in the order of the backward pass.
        group: the ranks that share the masters.
        validity: the validity of all weights.
        backend: makes the columnwise copies.
        overlap: True to leave gathers of quantized weights in flight when a step returns.
    """

    def __init__(
        self, buffers: Sequence[BucketBytes], group: Group, validity: Validity, backend: str, overlap: bool
    ) -> None:
        in_forward_order = buffers[::-1]
        self._buffers = sorted(in_forward_order, key=lambda buffer: not buffer.is_plain)
        self._group, self._validity, self._overlap = group, validity, overlap
        self._columnwise = {id(b): ColumnwiseCopies(b.weights, backend) for b in buffers}
        # The bucket of a weight, by the id of its state.
        self._home = {id(weight.state): b for b in buffers for weight in b.weights}
        # Buckets whose gather is in flight, keyed by id.
        self._flying: dict[int, BucketBytes] = {}
        # Buckets that have arrived on the stream that waited, possibly not yet on others, keyed by
        # id.
        self._ready_events: dict[int, ReadyEvent] = {}

    def land(self) -> None:
        """Complete the gathers in flight."""
        for buffer in list(self._flying.values()):
            self._finish(buffer)

    def check(self) -> bool:
        """Return True if parameters are stored outside of the flat buffers. Raises RuntimeError if
        anything else has written parameters since the last cast.

        A bucket whose gather is in flight is not checked: it cannot have been written yet.
        """
        has_moved = False
        for buffer in self._buffers:
            if id(buffer) not in self._flying:
                has_moved = buffer.check() or has_moved
        return has_moved

    def prepare(self) -> None:
        """Complete the gathers in flight, and move every weight back into the buffers that the
        gather writes.

        Raises RuntimeError if anything else has written parameters.
        """
        if self._flying:
            self.land()
        # All parameters are checked before anything changes.
        if self.check():
            self.reclaim()

    def reclaim(self) -> None:
        """Complete the gathers in flight and move every weight back into the buffers, without
        checks of the contents. Called before loaded masters are cast.
        """
        self.land()
        for buffer in self._buffers:
            buffer.reclaim()

    def tables(self) -> list[WeightTable]:
        """Return the tables of the columnwise copies."""
        return [table for buffer in self._buffers for table in self._columnwise[id(buffer)].tables()]

    def done(self) -> None:
        """Mark all columnwise copies as current, after a replay of a graph that gathered."""
        self._validity.copied()
        # The replay has run no Python, so it has recorded nothing.
        for buffer in self._buffers if debugging() else ():
            buffer.record()

    def start(self, plan: CastPlan) -> None:
        """Gather the bytes of the last cast and make columnwise copies.

        With overlap a gather may still be in flight when this returns. The first read waits for it.
        """
        with contextlib.ExitStack() as stack:
            # Threads that read now wait until all gathers have begun.
            for buffer in self._buffers:
                stack.enter_context(buffer.lock)
            if self._overlap:
                self._validity.before_read = self._finish_for
            for number, buffer in enumerate(self._buffers, 1):
                if self._group.size > 1:
                    buffer.start(self._group, f"weight bytes {number} of {len(self._buffers)}")
                self._flying[id(buffer)] = buffer
        for buffer in self._buffers:
            if buffer.is_plain or not self._overlap:
                self._finish(buffer)
        if not self._overlap:
            self._validity.copied()

    def _finish_for(self, weight: QuantizedWeight) -> None:
        buffer = self._home[id(weight.state)]
        self._finish(buffer)
        ready = self._ready_events.get(id(buffer))
        if ready is not None and ready.follow():
            self._ready_events.pop(id(buffer), None)
            self._forget()

    def _finish(self, buffer: BucketBytes) -> None:
        """Complete one gather and make its columnwise copies.

        A second thread waits here for the first. After an exception the gather is still in flight,
        for the next read.
        """
        with buffer.lock:
            if id(buffer) not in self._flying or buffer.landing:
                return
            # Making the copies asks the weights for their bytes, in this thread.
            buffer.landing = True
            try:
                if self._group.size > 1:
                    buffer.wait()
                # Without overlap all gathers end in `start`, which marks all weights together.
                self._columnwise[id(buffer)].make(marks=self._overlap)
            finally:
                buffer.landing = False
            buffer.record()
            ready = None if buffer.is_plain or not self._overlap else ReadyEvent.now(buffer.flats[0].device)
            if ready is not None:
                self._ready_events[id(buffer)] = ready
            del self._flying[id(buffer)]
            if not self._flying:
                self._forget()

    def _forget(self) -> None:
        """Remove the hook of reads once all bytes have arrived for all threads and streams."""
        if not self._flying and not self._ready_events:
            self._validity.before_read = None
