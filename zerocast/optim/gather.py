"""WeightGather: all-gathers the weight buffers, bucket by bucket.

The gather of a plain parameter is finished inside the step, since reads of it cannot be
intercepted. With overlap, the gather of a QuantizedWeight is finished when the weight is first
read, by a forward pass, a tied head, state_dict or an evaluation. If several threads read, each of
them waits, on a GPU each on its own stream.
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
    """A CUDA event for the arrival of the bytes of a bucket, on the stream that has waited for the
    gather. Readers on other streams wait for the event.
    """

    def __init__(self, device: torch.device) -> None:
        stream = torch.cuda.current_stream(device)
        self._device, self._stream = stream.device, stream.cuda_stream
        self._event = torch.cuda.Event()
        self._event.record(stream)

    @staticmethod
    def now(device: torch.device) -> "ReadyEvent | None":
        """Record an event on the current stream. None on a CPU, where all threads see the bytes
        once one has waited, and inside a CUDA graph, which waits for all streams at both ends.
        """
        needs_event = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        return ReadyEvent(device) if needs_event else None

    def follow(self) -> bool:
        """Let the current stream wait. Return True if no stream needs to wait any more."""
        # Nearly every read is on the stream that has waited, long before the event passes.
        if torch._C._cuda_getCurrentRawStream(self._device.index) == self._stream:
            return False
        if torch.cuda.is_current_stream_capturing():
            return False
        torch.cuda.current_stream(self._device).wait_event(self._event)
        return bool(self._event.query())


class WeightGather(Gather):
    """All-gathers the buckets after a cast and makes columnwise copies.

    Buckets of plain parameters are gathered first, since the step waits for them, then the others
    in the order of the forward pass.

    Args:
        buckets: the buckets in the order of the backward pass.
        group: the ranks that share the masters.
        validity: the validity of all weights.
        backend: the backend that makes columnwise copies.
        overlap: True to leave gathers of quantized weights in flight when a step returns.
    """

    def __init__(
        self, buckets: Sequence[BucketBytes], group: Group, validity: Validity, backend: str, overlap: bool
    ) -> None:
        in_forward_order = buckets[::-1]
        self._buckets = sorted(in_forward_order, key=lambda bucket: not bucket.is_plain)
        self._group, self._validity, self._overlap = group, validity, overlap
        # The columnwise copies of each bucket, keyed by its id. Fixed.
        self._columnwise = {id(bucket): ColumnwiseCopies(bucket.weights, backend) for bucket in buckets}
        # The bucket of each weight, keyed by the id of the weight's state. Fixed.
        self._bucket_of_state = {id(weight.state): bucket for bucket in buckets for weight in bucket.weights}
        # The buckets whose gather is in flight, keyed by id.
        self._in_flight: dict[int, BucketBytes] = {}
        # The events of finished gathers for which other streams may still have to wait, keyed by
        # the id of the bucket.
        self._ready_events: dict[int, ReadyEvent] = {}

    def finish_all(self) -> None:
        """Finish all gathers in flight."""
        for bucket in list(self._in_flight.values()):
            self._finish(bucket)

    def check(self) -> None:
        """Raise RuntimeError if other code has written parameters since the last cast."""
        for bucket in self._buckets:
            # Nothing has read or written a bucket whose gather is in flight.
            if id(bucket) not in self._in_flight:
                bucket.check()

    def prepare(self) -> None:
        """Finish the gathers in flight, and move every weight back into the flat buffers, which the
        next gather writes. Raises RuntimeError if other code has written parameters.
        """
        if self._in_flight:
            self.finish_all()
        touched = [bucket for bucket in self._buckets if not bucket.is_untouched]
        # All parameters are checked before anything changes.
        for bucket in touched:
            bucket.check()
        for bucket in touched:
            bucket.reclaim()

    def reclaim(self) -> None:
        """Finish the gathers in flight, and move every weight back into the flat buffers without
        checking for writes. Called before loaded masters are cast, which overwrites all weights.
        """
        self.finish_all()
        for bucket in self._buckets:
            bucket.reclaim()

    def tables(self) -> list[WeightTable]:
        """Return the tables of the columnwise copies. A CUDA graph holds their addresses."""
        return [table for bucket in self._buckets for table in self._columnwise[id(bucket)].tables()]

    def done(self) -> None:
        """Do the CPU's part of a gather that the replay of a CUDA graph has made: mark all
        columnwise copies as current.
        """
        self._validity.copied()
        # `_finish` records the contents of the buckets, but a replay runs no Python.
        if debugging():
            for bucket in self._buckets:
                bucket.record()

    def start(self, plan: CastPlan) -> None:
        """Gather the bytes of the last cast and make columnwise copies.

        With overlap a gather may still be in flight when this returns. The first read finishes it.
        """
        with contextlib.ExitStack() as stack:
            # With the locks, threads that read now wait until all gathers have begun.
            for bucket in self._buckets:
                stack.enter_context(bucket.lock)
            if self._overlap:
                self._validity.before_read = self._finish_before_read
            for number, bucket in enumerate(self._buckets, 1):
                if self._group.size > 1:
                    bucket.start(self._group, f"weight bytes {number} of {len(self._buckets)}")
                self._in_flight[id(bucket)] = bucket
        for bucket in self._buckets:
            if bucket.is_plain or not self._overlap:
                self._finish(bucket)
        if not self._overlap:
            self._validity.copied()

    def _finish_before_read(self, weight: QuantizedWeight) -> None:
        """Finish the gather of a weight that is about to be read, and let the current stream wait
        for its bytes.
        """
        bucket = self._bucket_of_state[id(weight.state)]
        self._finish(bucket)
        ready_event = self._ready_events.get(id(bucket))
        if ready_event is not None and ready_event.follow():
            self._ready_events.pop(id(bucket), None)
            self._remove_read_hook()

    def _finish(self, bucket: BucketBytes) -> None:
        """Finish the gather of one bucket and make its columnwise copies.

        A second thread waits here for the first. If this raises, the gather stays in flight, and
        the next read tries again.
        """
        with bucket.lock:
            if id(bucket) not in self._in_flight or bucket.is_finishing:
                return
            # Making the copies reads the weights, which calls this method again in this thread.
            bucket.is_finishing = True
            try:
                if self._group.size > 1:
                    bucket.wait()
                # Without overlap `start` finishes all gathers, and marks all weights together.
                self._columnwise[id(bucket)].make(marks=self._overlap)
            finally:
                bucket.is_finishing = False
            bucket.record()
            may_be_read_later = self._overlap and not bucket.is_plain
            ready_event = ReadyEvent.now(bucket.flats[0].device) if may_be_read_later else None
            if ready_event is not None:
                self._ready_events[id(bucket)] = ready_event
            del self._in_flight[id(bucket)]
            if not self._in_flight:
                self._remove_read_hook()

    def _remove_read_hook(self) -> None:
        """Stop intercepting reads if the bytes of all buckets have arrived on all streams."""
        if not self._in_flight and not self._ready_events:
            self._validity.before_read = None
