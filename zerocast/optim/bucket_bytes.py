"""BucketBytes: the flat buffers of one bucket, which are gathered and of which its weights are
views.
"""

import threading
from dataclasses import replace

import torch

from zerocast.cast.host import identity_weight
from zerocast.distributed.bucket import Bucket, Slot
from zerocast.distributed.group import Flight, Group
from zerocast.formats import layout
from zerocast.formats.dtypes import torch_dtype
from zerocast.optim.foreign_writes import ForeignWrites, PlainView, QuantizedViews
from zerocast.weight import QuantizedWeight


class BucketBytes:
    """The flat buffers of one bucket and the weights in them.

    Attributes:
        flats: the flat buffers, in the order of `bucket.storage.gathered`.
        weights: the weight of each of `bucket.slots`; an identity weight for a plain parameter.
        lock: held by the thread that completes the gather.
        landing: True while that thread does so.
        foreign_writes: detects writes to the weights by other code.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        gathered = bucket.storage.gathered
        self.flats = [
            torch.zeros(bucket.numel // n, dtype=torch_dtype(dtype), device=device) for _, dtype, n in gathered
        ]
        self._plain: list[PlainView] = []
        self._quantized: list[QuantizedViews] = []
        self.weights = [self._place(slot) for slot in bucket.slots]
        self.lock = threading.RLock()
        self.landing = False
        # The gather in flight, one operation for each flat buffer.
        self._works: list[Flight | None] = []
        self.foreign_writes = ForeignWrites(bucket, self.flats, self._plain, self._quantized)

    def _place(self, slot: Slot) -> QuantizedWeight:
        """Move a parameter into the flat buffers."""
        views = self.bucket.views(slot, self.flats)
        weight = slot.parameter
        if isinstance(weight, QuantizedWeight):
            shapes = layout.buffers(weight.format, weight.shape, weight.dtype)
            places = {}
            for (name, _, _), view in zip(self.bucket.storage.gathered, views, strict=True):
                shape = shapes[name]
                assert shape is not None, name
                places[name] = view.view(shape.shape)
            quantized = QuantizedViews(slot, weight, weight.state, places)
            quantized.move_to_buffers()
            self._quantized.append(quantized)
            return weight
        view = views[0].view(weight.shape).copy_(weight.detach())
        weight.data = view
        self._plain.append(PlainView(slot, view, view.data_ptr()))
        return identity_weight(view)

    def move_to(self, start: int) -> None:
        """Record that the bucket's shard now begins at `start` in the flat FP32 tensors."""
        self.bucket = replace(self.bucket, start=start)

    def gathers(self, name: str) -> bool:
        """Return True if the weights' buffers of this name are in a flat buffer."""
        return any(flat.name == name for flat in self.bucket.storage.gathered)

    @property
    def is_plain(self) -> bool:
        """True for a bucket of ordinary parameters."""
        return bool(self._plain)

    def start(self, group: Group, what: str = "weight bytes") -> None:
        """Begin to gather the bytes of all ranks, in place. Errors name the bytes as `what`."""
        if group.size > 1:
            parts = [flat.view(group.size, -1)[group.rank] for flat in self.flats]
            pairs = zip(self.flats, parts, strict=True)
            self._works = [group.all_gather_into(*pair, async_op=True, what=what) for pair in pairs]

    def wait(self) -> None:
        """Wait for the gather that `start` began."""
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = []
