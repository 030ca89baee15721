"""Weight buffers: flat bytes that the weights view, all-gathered bucket by bucket.

A plain parameter can be read by anyone at any time, so its gather ends inside the step. A QuantizedWeight is asked for its
bytes, so
with overlap its gather runs on until the first read, by whatever reads: a forward pass, a tied head, state_dict, evaluation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerocast import weight_state
from zerocast.batch import Batch
from zerocast.columnwise import ColumnwiseCopies
from zerocast.freshness import Freshness
from zerocast.group import Flight, Group
from zerocast.optim.bucket import IDENTITY, Bucket, Slot
from zerocast.weight import QuantizedWeight
from zerocast.weight_state import WeightState


class BucketBytes:
    """The flat buffers of one bucket and the weights in them: `weights[i]` stands for `bucket.slots[i]`."""

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        storage = bucket.storage
        directions = 2 if storage.both_directions else 1
        numel = bucket.numel // storage.elements_per_byte
        self.flats = [torch.zeros(numel, dtype=storage.dtype, device=device) for _ in range(directions)]
        self._plain: list[tuple[Tensor, Tensor]] = []  # ordinary parameters and their places
        self._quantized: list[tuple[QuantizedWeight, WeightState, list[Tensor]]] = []
        self.weights = [self._place(slot) for slot in bucket.slots]
        self._generation = weight_state.generation()
        self._works: list[Flight | None] = []

    def _place(self, slot: Slot) -> QuantizedWeight:
        scale = self.bucket.storage.elements_per_byte
        views = [flat[slot.offset // scale : (slot.offset + slot.numel) // scale] for flat in self.flats]
        weight = slot.parameter
        if isinstance(weight, QuantizedWeight):
            rows, columns = weight.matrix_shape
            places = [view.view(rows, columns // scale) for view in views]
            weight.rebind(*places)
            self._quantized.append((weight, weight.state, places))
            return weight
        view = views[0].view(weight.shape).copy_(weight.detach())
        weight.data = view
        self._plain.append((weight, view))
        matrix = view.view(-1, slot.shape[-1])
        return QuantizedWeight.of_buffers(slot.shape, IDENTITY, weight.dtype, {"rowwise_data": matrix})

    def reclaim(self) -> None:
        """Bring back weights that were moved to other storage since: this is where the gather writes."""
        for parameter, place in self._plain:
            if parameter.data_ptr() != place.data_ptr():
                _check_unchanged(parameter, place)
                parameter.data = place
        for weight, state, _ in self._quantized:
            if weight.state is not state:  # swapped by Module.to and the like
                _check_unchanged(weight.rowwise_data, state.rowwise_data)
                weight.state = state
        if self._generation != weight_state.generation():
            for weight, _, places in self._quantized:
                held = [weight.state.buffers[name] for name in ("rowwise_data", "columnwise_data")]
                if any(a is None or a.data_ptr() != b.data_ptr() for a, b in zip(held, places, strict=False)):
                    weight.rebind(*places)
            self._generation = weight_state.generation()

    @property
    def is_plain(self) -> bool:
        """Whether these are ordinary parameters."""
        return bool(self._plain)

    def start(self, group: Group, what: str = "weight bytes") -> None:
        """Begin to gather every rank's bytes, in place; `what` they are, for errors."""
        if group.size > 1:
            parts = [flat.view(group.size, -1)[group.rank] for flat in self.flats]
            pairs = zip(self.flats, parts, strict=True)
            self._works = [group.all_gather_into(*pair, async_op=True, what=what) for pair in pairs]

    def wait(self) -> None:
        """Until the bytes are here."""
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = []


def _check_unchanged(found: Tensor, place: Tensor) -> None:
    if (found.shape, found.dtype, found.device) != (place.shape, place.dtype, place.device):
        raise RuntimeError(
            f"a parameter was {place.dtype} {tuple(place.shape)} on {place.device} when its optimizer was built and is "
            f"{found.dtype} {tuple(found.shape)} on {found.device} now: move and convert the model first"
        )


class WeightGather:
    """All-gathers the buckets after a cast, in the order of the forward pass, and makes columnwise copies."""

    def __init__(
        self, buffers: Sequence[BucketBytes], group: Group, freshness: Freshness, backend: str, overlap: bool
    ) -> None:
        self._buffers = list(reversed(buffers))
        self._group, self._freshness, self._overlap = group, freshness, overlap
        self._columnwise = {id(b): ColumnwiseCopies([] if b.is_plain else b.weights, backend) for b in buffers}
        self._home = {id(weight.state): b for b in buffers for weight in b.weights}
        self._flying: dict[int, BucketBytes] = {}

    def ready(self) -> None:
        """Before a cast writes: nothing in flight, and every weight where the gather will write."""
        for buffer in list(self._flying.values()):
            self._finish(buffer)
        for buffer in self._buffers:
            buffer.reclaim()

    def batches(self) -> list[Batch]:
        """The tables of the columnwise copies."""
        return [batch for buffer in self._buffers for batch in self._columnwise[id(buffer)].batches()]

    def done(self) -> None:
        """What has arrived was made from the last cast; what is in flight will say so itself."""
        if not self._flying:
            self._freshness.columnwise = self._freshness.cast

    def start(self) -> None:
        """Gather; with overlap, what may be still on its way when this returns waits at its first read."""
        for number, buffer in enumerate(self._buffers, 1):
            buffer.start(self._group, f"weight bytes {number} of {len(self._buffers)}")
            self._flying[id(buffer)] = buffer
        if self._overlap:
            self._freshness.finish = self._finish_for
        for buffer in self._buffers:
            if buffer.is_plain or not self._overlap:
                self._finish(buffer)

    def _finish_for(self, weight: QuantizedWeight) -> None:
        self._finish(self._home[id(weight.state)])

    def _finish(self, buffer: BucketBytes) -> None:
        if self._flying.pop(id(buffer), None) is None:
            return
        if not self._flying:
            self._freshness.finish = None
        try:
            buffer.wait()
            self._columnwise[id(buffer)].make()
        except BaseException:  # the next read tries again, or says again that a rank has died
            self._flying[id(buffer)] = buffer
            self._freshness.finish = self._finish_for
            raise
        for weight in buffer.weights:
            weight.state.mark_columnwise()
