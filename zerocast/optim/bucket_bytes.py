"""BucketBytes: the flat buffers of one bucket, which are gathered and of which its weights are
views.

It also detects that other code has written or moved the parameters. A cast overwrites the weights
with the values of the masters, so the next step would undo writes of other code into the weights.
The version counters of flat buffers and plain parameters show a write at the cost of a comparison.
A parameter whose storage was replaced (`.data =`, `Module.to`) is compared with the bytes in the
flat buffer. Writes that advance no counter (by `.data`, numpy or kernels of other packages) are
detected in debug mode only, with a copy.
"""

import operator
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zerocast.cast.host import identity_weight
from zerocast.distributed.agreement import first_of
from zerocast.distributed.bucket import Bucket, Slot
from zerocast.distributed.group import Flight, Group
from zerocast.formats import layout
from zerocast.formats.element import torch_dtype
from zerocast.weight import QuantizedWeight
from zerocast.weight.state import WeightState, same_bytes
from zerocast.weight.validity import Validity, debugging

LOST = (
    "the next step would overwrite these values by a cast of the FP32 masters. To change the masters, call "
    "zerocast.optim.load_masters(optimizer, high_precision_state), or optimizer.load_state_dict(state) after "
    "model.load_state_dict(...); for averages use zerocast.optim.EMA"
)

_version: Callable[[Tensor], int] = operator.attrgetter("_version")
_state: Callable[[QuantizedWeight], WeightState] = operator.attrgetter("state")


class BucketBytes:
    """The flat buffers of one bucket and the weights in them.

    Attributes:
        flats: the flat buffers, in the order of `bucket.storage.gathered`.
        weights: the weight of each of `bucket.slots`; an identity weight for a plain parameter.
        is_plain: True for a bucket of ordinary parameters.
        lock: held by the thread that finishes the gather.
        is_finishing: True while that thread does so.
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
        self.is_plain = bool(self._plain)
        self.lock = threading.RLock()
        self.is_finishing = False
        # The gather in flight, one operation for each flat buffer.
        self._works: list[Flight | None] = []
        self._parameters = [p.slot.parameter for p in self._plain]
        self._addresses = [p.address for p in self._plain]
        self._weights = [q.weight for q in self._quantized]
        self._states = [q.state for q in self._quantized]
        # The result of `_location` when all weights were last seen in the flat buffers.
        self._seen_in_buffers: tuple[Validity, int] | None = None
        # The tensors whose version counters are compared.
        self._watched = [*self.flats, *self._parameters]
        self.record()

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

    def start(self, group: Group, what: str = "weight bytes") -> None:
        """Begin to all-gather the flat buffers in place: each rank sends its equal part of each.
        `wait` completes it. Errors name the bytes as `what`.
        """
        parts = [flat.view(group.size, -1)[group.rank] for flat in self.flats]
        pairs = zip(self.flats, parts, strict=True)
        self._works = [group.all_gather_into(*pair, async_op=True, what=what) for pair in pairs]

    def wait(self) -> None:
        """Wait for the gather that `start` began."""
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = []

    def record(self) -> None:
        """Record the current contents of the parameters, with which later checks compare."""
        self._versions = list(map(_version, self._watched))
        is_capturing = self.flats[0].is_cuda and torch.cuda.is_current_stream_capturing()
        self._copies = [flat.clone() for flat in self.flats] if debugging() and not is_capturing else []

    @property
    def is_untouched(self) -> bool:
        """True if it is certain that no parameter was written or moved since `record`."""
        # Every step asks.
        unchanged = not self._copies and list(map(_version, self._watched)) == self._versions
        in_buffers = list(map(Tensor.data_ptr, self._parameters)) == self._addresses
        same_states = all(map(operator.is_, map(_state, self._weights), self._states))
        return unchanged and in_buffers and same_states and self._seen_in_buffers == self._location()

    def check(self) -> None:
        """Raise RuntimeError if parameters in their views were written since `record`, or if
        parameters that are stored outside of their views have different values there.
        """
        self._check_unwritten()
        self._check_moved()

    def _check_unwritten(self) -> None:
        copies = self._copies if debugging() else []
        unchanged = list(map(_version, self._watched)) == self._versions
        if unchanged and all(same_bytes(*pair) for pair in zip(self.flats, copies, strict=False)):
            return
        recorded_versions = dict(zip(map(id, self._watched), self._versions, strict=True))
        names = [
            p.slot.name
            for p in self._plain
            if p.is_in_buffer and p.slot.parameter._version != recorded_versions[id(p.slot.parameter)]
        ]
        if copies:
            for slot in self.bucket.slots:
                views = zip(self.bucket.views(slot, self.flats), self.bucket.views(slot, copies), strict=True)
                if not all(same_bytes(*pair) for pair in views):
                    names.append(slot.name)
        elif any(flat._version != recorded_versions[id(flat)] for flat in self.flats):
            # A flat buffer has one counter, so any of its parameters may have been written.
            names += [slot.name for slot in self.bucket.slots]
        if names:
            raise RuntimeError(f"parameters were written since the last step, among {first_of(names)}: {LOST}")

    def _check_moved(self) -> None:
        plain = [p for p in self._plain if not p.is_in_buffer]
        quantized = [q for q in self._quantized if q.weight.state is not q.state or any(q.moved())]
        for p in plain:
            _check_fits(p.slot.parameter, p.view)
        names = [p.slot.name for p in plain if not same_bytes(p.slot.parameter, p.view)]
        names += [q.slot.name for q in quantized if q.differs()]
        if names:
            raise RuntimeError(
                f"parameters have a different storage and different values since the last step, {first_of(names)}: {LOST}"
            )

    def _location(self) -> tuple[Validity, int] | None:
        """Return a value that compares equal as long as no weight has moved. All weights of a
        bucket have the validity of one plan, which counts moves.
        """
        if not self._quantized:
            return None
        validity = self._quantized[0].state.validity
        return validity, validity.storage_version

    def reclaim(self) -> None:
        """Move parameters back into their views, where the gather writes."""
        for p in self._plain:
            if not p.is_in_buffer:
                _check_fits(p.slot.parameter, p.view)
                p.slot.parameter.data = p.view
        for q in self._quantized:
            if q.weight.state is not q.state:
                # Module.to, `.data =` and the like replace the state of a weight.
                _check_fits(q.weight.rowwise_data, q.state.rowwise_data)
                q.weight.restate(q.state)
            if any(q.moved()):
                q.move_to_buffers()
        self._seen_in_buffers = self._location()
        self.record()


@dataclass(frozen=True)
class PlainView:
    """An ordinary parameter and its view of the flat buffer.

    Attributes:
        view: the view of the flat buffer in the shape of the parameter.
        address: the address of that view.
    """

    slot: Slot
    view: Tensor
    address: int

    @property
    def is_in_buffer(self) -> bool:
        """True if the parameter is stored in its view."""
        return self.slot.parameter.data_ptr() == self.address


@dataclass(frozen=True)
class QuantizedViews:
    """A QuantizedWeight and the views of the flat buffers for its buffers.

    Attributes:
        state: the state of the weight when it was placed. `Module.to` may replace the state of the
            weight.
        views: views of the flat buffers by the name of the weight's buffer.
    """

    slot: Slot
    weight: QuantizedWeight
    state: WeightState
    views: dict[str, Tensor]

    def moved(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (current buffer, its view) of the buffers that are not stored in their views."""
        for name, view in self.views.items():
            tensor = self.state.buffers[name]
            if tensor is None or tensor.data_ptr() != view.data_ptr():
                yield view if tensor is None else tensor, view

    def move_to_buffers(self) -> None:
        """Move the weight into its views, with its current bytes."""
        self.weight.wait()
        self.state.move_to(self.views)

    def differs(self) -> bool:
        """Return True if the current bytes of the weight differ from the bytes in its views."""
        if self.weight.state is not self.state:
            _check_fits(self.weight.rowwise_data, self.state.rowwise_data)
            return self.weight.state.differs(self.state)
        return not all(same_bytes(*pair) for pair in self.moved())


def _check_fits(tensor: Tensor, view: Tensor) -> None:
    """Raise RuntimeError unless a tensor fits into a view."""
    if (tensor.shape, tensor.dtype, tensor.device) != (view.shape, view.dtype, view.device):
        raise RuntimeError(
            f"a parameter was {view.dtype} {tuple(view.shape)} on {view.device} when its optimizer was built and is "
            f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device} now: move, convert and resize the model first"
        )
