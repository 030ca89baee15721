"""BucketBytes: the flat bytes of one bucket, which its weights view, and whether anybody else has
changed what the weights hold.

Masters are the truth: what somebody else writes into the weights would be lost with the next cast.
The version counters of flat buffers and plain parameters tell at the cost of a comparison; what was
given other storage (`.data =`, `Module.to`) is compared with the bytes that lie in ours. Writes
that move no counter (`.data`, numpy, kernels of others) are seen in debug mode, by a copy.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.distributed.group import Flight, Group
from zerocast.formats import layout
from zerocast.optim.bucket import IDENTITY, Bucket, Slot
from zerocast.weight import QuantizedWeight
from zerocast.weight import state as weight_state
from zerocast.weight.freshness import debugging
from zerocast.weight.state import WeightState, same_bytes

SHOWN = 4
LOST = (
    "masters are the truth, so the next step would undo that. Call zerocast.optim.load_masters(optimizer, state) to train from "
    "such values, in high precision, or optimizer.load_state_dict(state), after the model's; and average with zerocast.optim.EMA"
)


@dataclass(frozen=True)
class _Plain:
    """An ordinary parameter and its place in the flat buffer."""

    slot: Slot
    place: Tensor
    address: int

    @property
    def is_home(self) -> bool:
        return self.slot.parameter.data_ptr() == self.address


@dataclass(frozen=True)
class _Quantized:
    """A QuantizedWeight, its storage, and the places of its buffers in the flat ones, by name."""

    slot: Slot
    weight: QuantizedWeight
    state: WeightState
    places: dict[str, Tensor]

    def moved(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(buffer as it lies now, its place) of what was moved."""
        for name, place in self.places.items():
            tensor = self.state.buffers[name]
            if tensor is None or tensor.data_ptr() != place.data_ptr():
                yield place if tensor is None else tensor, place

    def move_home(self) -> None:
        """Let the weight lie in its places, with the bytes that it holds."""
        self.weight.wait()
        self.state.move_to(self.places)

    def differs(self) -> bool:
        """Whether it holds other bytes than its place."""
        if self.weight.state is not self.state:
            _check_alike(self.weight.rowwise_data, self.state.rowwise_data)
            return self.weight.state.differs(self.state)
        return not all(same_bytes(*pair) for pair in self.moved())


class BucketBytes:
    """The flat buffers of one bucket and the weights in them: `weights[i]` stands for
    `bucket.slots[i]`.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        gathered = bucket.storage.gathered
        self.flats = [torch.zeros(bucket.numel // n, dtype=dtype, device=device) for _, dtype, n in gathered]
        self._plain: list[_Plain] = []
        self._quantized: list[_Quantized] = []
        self.weights = [self._place(slot) for slot in bucket.slots]
        self.lock = threading.RLock()  # held by the thread that completes the gather
        self.landing = False  # while it does
        self._generation = weight_state.generation()
        self._works: list[Flight | None] = []
        self._watched = [*self.flats, *(plain.slot.parameter for plain in self._plain)]
        self.note()

    def _place(self, slot: Slot) -> QuantizedWeight:
        views = self._views(slot, self.flats)
        weight = slot.parameter
        if isinstance(weight, QuantizedWeight):
            shapes = layout.buffers(weight.format, weight.matrix_shape, weight.dtype)
            places = {}
            for (name, _, _), view in zip(self.bucket.storage.gathered, views, strict=True):
                shape = shapes[name]
                assert shape is not None, name
                places[name] = view.view(shape.shape)
            quantized = _Quantized(slot, weight, weight.state, places)
            quantized.move_home()
            self._quantized.append(quantized)
            return weight
        view = views[0].view(weight.shape).copy_(weight.detach())
        weight.data = view
        self._plain.append(_Plain(slot, view, view.data_ptr()))
        matrix = view.view(-1, slot.shape[-1])
        return QuantizedWeight.of_buffers(slot.shape, IDENTITY, weight.dtype, {"rowwise_data": matrix})

    def _views(self, slot: Slot, flats: Sequence[Tensor]) -> list[Tensor]:
        gathered = zip(self.bucket.storage.gathered, flats, strict=True)
        return [flat[slot.offset // n : (slot.offset + slot.numel) // n] for (_, _, n), flat in gathered]

    def gathers(self, name: str) -> bool:
        """Whether the weights' buffers `name` lie in a flat buffer here."""
        return any(flat.name == name for flat in self.bucket.storage.gathered)

    def note(self) -> None:
        """Remember what the parameters hold now, so that what others write later shows."""
        self._versions = [tensor._version for tensor in self._watched]
        recording = self.flats[0].is_cuda and torch.cuda.is_current_stream_capturing()
        self._copies = [flat.clone() for flat in self.flats] if debugging() and not recording else []

    def check_unwritten(self) -> None:
        """RuntimeError if anybody else has written the parameters where they lie, since `note`."""
        copied = self._copies if debugging() else []
        unchanged = [tensor._version for tensor in self._watched] == self._versions
        if unchanged and all(same_bytes(*pair) for pair in zip(self.flats, copied, strict=False)):
            return
        noted = dict(zip(map(id, self._watched), self._versions, strict=True))
        names = [
            p.slot.name for p in self._plain if p.is_home and p.slot.parameter._version != noted[id(p.slot.parameter)]
        ]
        if copied:
            pairs = [
                (slot, zip(self._views(slot, self.flats), self._views(slot, copied), strict=True))
                for slot in self.bucket.slots
            ]
            names += [slot.name for slot, views in pairs if not all(same_bytes(*pair) for pair in views)]
        elif any(flat._version != noted[id(flat)] for flat in self.flats):
            names += [slot.name for slot in self.bucket.slots]
        if names:
            raise RuntimeError(f"parameters were written since the last step, among {_some(names)}: {LOST}")

    def check_moved(self) -> bool:
        """Whether parameters have other storage than ours; RuntimeError if that holds other
        values.
        """
        plain = [p for p in self._plain if not p.is_home]
        for p in plain:
            _check_alike(p.slot.parameter, p.place)
        quantized = [q for q in self._quantized if q.weight.state is not q.state]
        if self._generation != weight_state.generation():
            quantized = [q for q in self._quantized if q.weight.state is not q.state or any(q.moved())]
        names = [p.slot.name for p in plain if not same_bytes(p.slot.parameter, p.place)]
        names += [q.slot.name for q in quantized if q.differs()]
        if names:
            raise RuntimeError(
                f"parameters have other storage and hold other values since the last step, {_some(names)}: {LOST}"
            )
        moved = bool(plain or quantized)
        if not moved:  # else `reclaim` brings them back, also where another bucket raises first
            self._generation = weight_state.generation()
        return moved

    def reclaim(self) -> None:
        """Bring back weights that were moved to other storage since: this is where the gather
        writes.
        """
        for p in self._plain:
            if not p.is_home:
                _check_alike(p.slot.parameter, p.place)
                p.slot.parameter.data = p.place
        for q in self._quantized:
            if q.weight.state is not q.state:  # swapped by Module.to, `.data =` and the like
                _check_alike(q.weight.rowwise_data, q.state.rowwise_data)
                q.weight.restate(q.state)
            if any(q.moved()):
                q.move_home()
        self._generation = weight_state.generation()
        self.note()

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


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _check_alike(found: Tensor, place: Tensor) -> None:
    if (found.shape, found.dtype, found.device) != (place.shape, place.dtype, place.device):
        raise RuntimeError(
            f"a parameter was {place.dtype} {tuple(place.shape)} on {place.device} when its optimizer was built and is "
            f"{found.dtype} {tuple(found.shape)} on {found.device} now: move and convert the model first"
        )
