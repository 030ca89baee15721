"""ForeignWrites: whether other code has written or moved the parameters of a bucket.

Weights are cast from masters, so the next cast would undo what other code writes into them. Version
counters of flat buffers and plain parameters show such writes at the cost of a comparison. A
parameter that was given other storage (`.data =`, `Module.to`) is compared with the bytes in the
flat buffer. Writes that move no counter (`.data`, numpy, foreign kernels) are seen in debug mode
only, by a copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.optim.bucket import Bucket, Slot
from zerocast.weight import QuantizedWeight
from zerocast.weight.state import WeightState, same_bytes
from zerocast.weight.validity import Validity, debugging

SHOWN = 4
LOST = (
    "masters are the truth, so the next step would undo that. Call zerocast.optim.load_masters(optimizer, state) to train from "
    "such values, in high precision, or optimizer.load_state_dict(state), after the model's; and average with zerocast.optim.EMA"
)


@dataclass(frozen=True)
class PlainPlace:
    """An ordinary parameter and its place in the flat buffer."""

    slot: Slot
    place: Tensor
    address: int

    @property
    def is_home(self) -> bool:
        """True if the parameter lies where it was placed."""
        return self.slot.parameter.data_ptr() == self.address


@dataclass(frozen=True)
class QuantizedPlace:
    """A QuantizedWeight, its storage, and the places of its buffers in the flat ones, by name."""

    slot: Slot
    weight: QuantizedWeight
    state: WeightState
    places: dict[str, Tensor]

    def moved(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (buffer as it lies now, its place) for every buffer that was moved."""
        for name, place in self.places.items():
            tensor = self.state.buffers[name]
            if tensor is None or tensor.data_ptr() != place.data_ptr():
                yield place if tensor is None else tensor, place

    def move_home(self) -> None:
        """Move the weight's bytes back to its places."""
        self.weight.wait()
        self.state.move_to(self.places)

    def differs(self) -> bool:
        """True if it holds other bytes than its place."""
        if self.weight.state is not self.state:
            _check_alike(self.weight.rowwise_data, self.state.rowwise_data)
            return self.weight.state.differs(self.state)
        return not all(same_bytes(*pair) for pair in self.moved())


class ForeignWrites:
    """Compares the parameters of a bucket with what they held when `note` was called last.

    Args:
        bucket: the bucket.
        flats: its flat buffers.
        plain, quantized: where each parameter lies in them.
    """

    def __init__(
        self,
        bucket: Bucket,
        flats: Sequence[Tensor],
        plain: Sequence[PlainPlace],
        quantized: Sequence[QuantizedPlace],
    ) -> None:
        self._bucket, self._flats, self._plain, self._quantized = bucket, flats, plain, quantized
        # `_places()` at the last look that found all weights in the flat buffers.
        self._at_home: tuple[Validity, int] | None = None
        self._watched = [*flats, *(place.slot.parameter for place in plain)]
        self.note()

    def note(self) -> None:
        """Remember what the parameters hold now, so that later writes of other code show."""
        self._versions = [tensor._version for tensor in self._watched]
        recording = self._flats[0].is_cuda and torch.cuda.is_current_stream_capturing()
        self._copies = [flat.clone() for flat in self._flats] if debugging() and not recording else []

    def check_unwritten(self) -> None:
        """RuntimeError if other code has written the parameters where they lie, since `note`."""
        copied = self._copies if debugging() else []
        unchanged = [tensor._version for tensor in self._watched] == self._versions
        if unchanged and all(same_bytes(*pair) for pair in zip(self._flats, copied, strict=False)):
            return
        noted = dict(zip(map(id, self._watched), self._versions, strict=True))
        names = [
            p.slot.name for p in self._plain if p.is_home and p.slot.parameter._version != noted[id(p.slot.parameter)]
        ]
        if copied:
            pairs = [
                (slot, zip(self._bucket.views(slot, self._flats), self._bucket.views(slot, copied), strict=True))
                for slot in self._bucket.slots
            ]
            names += [slot.name for slot, views in pairs if not all(same_bytes(*pair) for pair in views)]
        elif any(flat._version != noted[id(flat)] for flat in self._flats):
            names += [slot.name for slot in self._bucket.slots]
        if names:
            raise RuntimeError(f"parameters were written since the last step, among {_some(names)}: {LOST}")

    def check_moved(self) -> bool:
        """True if parameters have other storage than the flat buffers; RuntimeError if that holds
        other values.
        """
        plain = [p for p in self._plain if not p.is_home]
        quantized = [q for q in self._quantized if q.weight.state is not q.state]
        places = self._places()
        if self._at_home != places:
            quantized = [q for q in self._quantized if q.weight.state is not q.state or any(q.moved())]
        if not plain and not quantized:
            self._at_home = places
            return False
        for p in plain:
            _check_alike(p.slot.parameter, p.place)
        names = [p.slot.name for p in plain if not same_bytes(p.slot.parameter, p.place)]
        names += [q.slot.name for q in quantized if q.differs()]
        if names:
            raise RuntimeError(
                f"parameters have other storage and hold other values since the last step, {_some(names)}: {LOST}"
            )
        # `reclaim` brings them back.
        return True

    def _places(self) -> tuple[Validity, int] | None:
        """Return what compares equal as long as no weight of the bucket has moved: they have one
        plan and so one validity. None without quantized weights.
        """
        if not self._quantized:
            return None
        validity = self._quantized[0].state.validity
        return validity, validity.places

    def reclaim(self) -> None:
        """Bring parameters that were given other storage back to the flat buffers, into which the
        gather writes.
        """
        for p in self._plain:
            if not p.is_home:
                _check_alike(p.slot.parameter, p.place)
                p.slot.parameter.data = p.place
        for q in self._quantized:
            # `Module.to`, `.data =` and the like swap the state.
            if q.weight.state is not q.state:
                _check_alike(q.weight.rowwise_data, q.state.rowwise_data)
                q.weight.restate(q.state)
            if any(q.moved()):
                q.move_home()
        self._at_home = self._places()
        self.note()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _check_alike(found: Tensor, place: Tensor) -> None:
    if (found.shape, found.dtype, found.device) != (place.shape, place.dtype, place.device):
        raise RuntimeError(
            f"a parameter was {place.dtype} {tuple(place.shape)} on {place.device} when its optimizer was built and is "
            f"{found.dtype} {tuple(found.shape)} on {found.device} now: move and convert the model first"
        )
