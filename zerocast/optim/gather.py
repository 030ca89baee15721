"""WeightGather: weight buffers are all-gathered bucket by bucket, and waited for by whatever reads.

A plain parameter can be read by anyone at any time, so its gather ends inside the step. A
QuantizedWeight is asked for its bytes, so with overlap its gather runs on until the first read, by
whatever reads: a forward pass, a tied head, state_dict, evaluation. Threads may read at the same
time: each of them waits, and on a GPU each on its own stream.
"""

import contextlib
from collections.abc import Sequence

import torch

from zerocast.cast.columnwise import ColumnwiseCopies
from zerocast.cast.tables import WeightTable
from zerocast.distributed.group import Group
from zerocast.optim.bucket_bytes import BucketBytes
from zerocast.weight import QuantizedWeight
from zerocast.weight.validity import Validity, debugging


class Arrival:
    """When the bytes of a bucket are there on a GPU: whoever reads on another stream than the
    one that waited waits for this.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._event = torch.cuda.Event()
        self._event.record(self._stream)

    @staticmethod
    def now(device: torch.device) -> "Arrival | None":
        """None on a CPU, where who waited has the bytes, and inside a graph, which begins and
        ends in step with all streams.
        """
        outside = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        return Arrival(device) if outside else None

    def follow(self) -> bool:
        """Let the current stream wait; whether the bytes are there already, for all streams."""
        if torch.cuda.is_current_stream_capturing():
            return False
        current = torch.cuda.current_stream(self._stream.device)
        if current != self._stream:
            current.wait_event(self._event)
        return bool(self._event.query())


class WeightGather:
    """All-gathers the buckets after a cast, in the order of the forward pass, and makes
    columnwise copies.
    """

    def __init__(
        self, buffers: Sequence[BucketBytes], group: Group, validity: Validity, backend: str, overlap: bool
    ) -> None:
        self._buffers = list(reversed(buffers))
        self._group, self._validity, self._overlap = group, validity, overlap
        self._columnwise = {id(b): ColumnwiseCopies(b.weights, backend) for b in buffers}
        self._home = {id(weight.state): b for b in buffers for weight in b.weights}
        self._flying: dict[int, BucketBytes] = {}
        self._arrivals: dict[int, Arrival] = {}

    def land(self) -> None:
        """Complete what is in flight."""
        for buffer in list(self._flying.values()):
            self._finish(buffer)

    def check_unwritten(self) -> None:
        """RuntimeError if anybody else has written parameters since the last cast.

        A bucket whose gather still runs is passed over: nobody can have written it yet.
        """
        for buffer in self._buffers:
            if id(buffer) not in self._flying:
                buffer.foreign_writes.check_unwritten()

    def check_moved(self) -> bool:
        """True if parameters have other storage than ours; RuntimeError if that holds other
        values. All are looked at before anything changes.
        """
        moved = [b.foreign_writes.check_moved() for b in self._buffers if id(b) not in self._flying]
        return any(moved)

    def ready(self) -> None:
        """Before a cast writes: nothing in flight, every weight where the gather will write, and
        written by nobody else.
        """
        self.land()
        self.check_unwritten()
        if self.check_moved():
            self.reclaim()

    def reclaim(self) -> None:
        """The same, whatever the weights hold: masters were loaded."""
        self.land()
        for buffer in self._buffers:
            buffer.foreign_writes.reclaim()

    def tables(self) -> list[WeightTable]:
        """The tables of the columnwise copies."""
        return [table for buffer in self._buffers for table in self._columnwise[id(buffer)].tables()]

    def done(self) -> None:
        """Mark all columnwise copies as those of the last cast, unless a gather is in flight:
        its end marks its own.
        """
        if self._flying:
            return
        self._validity.copied()
        for buffer in self._buffers if debugging() else ():  # a replayed graph has noted nothing
            buffer.foreign_writes.note()

    def start(self) -> None:
        """Gather the bytes of the last cast and make columnwise copies.

        With overlap a gather may still be on its way when this returns; whatever reads first waits.
        """
        with contextlib.ExitStack() as stack:
            for buffer in self._buffers:  # threads that read from here on wait until all have begun
                stack.enter_context(buffer.lock)
            if self._overlap:
                self._validity.finish = self._finish_for
            for number, buffer in enumerate(self._buffers, 1):
                buffer.start(self._group, f"weight bytes {number} of {len(self._buffers)}")
                self._flying[id(buffer)] = buffer
        for buffer in self._buffers:
            if buffer.is_plain or not self._overlap:
                self._finish(buffer)
        self.done()

    def _finish_for(self, weight: QuantizedWeight) -> None:
        buffer = self._home[id(weight.state)]
        self._finish(buffer)
        arrival = self._arrivals.get(id(buffer))
        if arrival is not None and arrival.follow():
            self._arrivals.pop(id(buffer), None)
            self._forget()

    def _finish(self, buffer: BucketBytes) -> None:
        """Complete one gather. A second thread waits here for the first; what raises leaves it
        in flight for the next read.
        """
        with buffer.lock:
            if id(buffer) not in self._flying or buffer.landing:
                return
            # making the copies asks the weights for their bytes, in this thread
            buffer.landing = True
            try:
                buffer.wait()
                self._columnwise[id(buffer)].make()
            finally:
                buffer.landing = False
            for weight in buffer.weights:
                weight.state.mark_columnwise()
            buffer.foreign_writes.note()
            arrival = None if buffer.is_plain or not self._overlap else Arrival.now(buffer.flats[0].device)
            if arrival is not None:
                self._arrivals[id(buffer)] = arrival
            del self._flying[id(buffer)]
            self._forget()

    def _forget(self) -> None:
        """Once everything is there, for all threads and streams, reads need not ask any more."""
        if not self._flying and not self._arrivals:
            self._validity.finish = None
