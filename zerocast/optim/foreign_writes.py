"""ForeignWrites: detects that other code has written or moved the parameters of a bucket.

A cast overwrites the weights with the values of the masters, so the next step would undo what other
code writes into the weights. The version counters of flat buffers and plain parameters show a write
at the cost of a comparison. A parameter that was given other storage (`.data =`, `Module.to`) is
compared with the bytes in the flat buffer. Writes that move no counter (by `.data`, numpy or
kernels of others) are detected in debug mode only, with a copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.distributed.bucket import Bucket, Slot
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
    """An ordinary parameter and its place in the flat buffer.

    Attributes:
        place: the view of the flat buffer in the shape of the parameter.
        address: the address of that view.
    """

    slot: Slot
    place: Tensor
    address: int

    @property
    def is_home(self) -> bool:
        """True if the storage of the parameter is its place."""
        return self.slot.parameter.data_ptr() == self.address


@dataclass(frozen=True)
class QuantizedPlace:
    """A QuantizedWeight and the places of its buffers in the flat buffers.

    Attributes:
        state: the state of the weight when it was placed. `Module.to` may give the weight another
            one.
        places: views of the flat buffers by the name of the weight's buffer.
    """

    slot: Slot
    weight: QuantizedWeight
    state: WeightState
    places: dict[str, Tensor]

    def moved(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (present buffer, its place) of the buffers that are not in their places."""
        for name, place in self.places.items():
            tensor = self.state.buffers[name]
            if tensor is None or tensor.data_ptr() != place.data_ptr():
                yield place if tensor is None else tensor, place

    def move_home(self) -> None:
        """Move the weight into its places, with its present bytes."""
        self.weight.wait()
        self.state.move_to(self.places)

    def differs(self) -> bool:
        """True if the present bytes of the weight differ from those in its places."""
        if self.weight.state is not self.state:
            _check_alike(self.weight.rowwise_data, self.state.rowwise_data)
            return self.weight.state.differs(self.state)
        return not all(same_bytes(*pair) for pair in self.moved())


class ForeignWrites:
    """Compares the parameters of a bucket with their contents at the last call of `note`.

    `plain` and `quantized` are the places of all parameters in `flats`, the flat buffers.
    """

    def __init__(
        self,
        bucket: Bucket,
        flats: Sequence[Tensor],
        plain: Sequence[PlainPlace],
        quantized: Sequence[QuantizedPlace],
    ) -> None:
        self._bucket = bucket
        self._flats = flats
        self._plain = plain
        self._quantized = quantized
        # The result of `_places` when all weights were last seen in the flat buffers.
        self._at_home: tuple[Validity, int] | None = None
        # The tensors whose version counters are compared.
        self._watched = [*flats, *(place.slot.parameter for place in plain)]
        self.note()

    def note(self) -> None:
        """Remember the present contents of the parameters, with which later checks compare."""
        self._versions = [tensor._version for tensor in self._watched]
        recording = self._flats[0].is_cuda and torch.cuda.is_current_stream_capturing()
        self._copies = [flat.clone() for flat in self._flats] if debugging() and not recording else []

    def check_unwritten(self) -> None:
        """RuntimeError if parameters in their places were written since `note`."""
        copies = self._copies if debugging() else []
        unchanged = [tensor._version for tensor in self._watched] == self._versions
        if unchanged and all(same_bytes(*pair) for pair in zip(self._flats, copies, strict=False)):
            return
        noted = dict(zip(map(id, self._watched), self._versions, strict=True))
        names = [
            p.slot.name for p in self._plain if p.is_home and p.slot.parameter._version != noted[id(p.slot.parameter)]
        ]
        if copies:
            for slot in self._bucket.slots:
                views = zip(self._bucket.views(slot, self._flats), self._bucket.views(slot, copies), strict=True)
                if not all(same_bytes(*pair) for pair in views):
                    names.append(slot.name)
        elif any(flat._version != noted[id(flat)] for flat in self._flats):
            # A counter is that of a whole flat buffer, so any of its parameters may have been
            # written.
            names += [slot.name for slot in self._bucket.slots]
        if names:
            raise RuntimeError(f"parameters were written since the last step, among {_some(names)}: {LOST}")

    def check_moved(self) -> bool:
        """True if parameters have other storage than their places. RuntimeError if that storage has
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
        """A value that compares equal as long as no weight has moved. All weights of a bucket have
        the validity of one plan, which counts moves.
        """
        if not self._quantized:
            return None
        validity = self._quantized[0].state.validity
        return validity, validity.places

    def reclaim(self) -> None:
        """Move parameters with other storage back into their places, where the gather writes."""
        for p in self._plain:
            if not p.is_home:
                _check_alike(p.slot.parameter, p.place)
                p.slot.parameter.data = p.place
        for q in self._quantized:
            if q.weight.state is not q.state:
                # Module.to, `.data =` and the like give a weight another state.
                _check_alike(q.weight.rowwise_data, q.state.rowwise_data)
                q.weight.restate(q.state)
            if any(q.moved()):
                q.move_home()
        self._at_home = self._places()
        self.note()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _check_alike(tensor: Tensor, place: Tensor) -> None:
    """RuntimeError unless a tensor fits into a place."""
    if (tensor.shape, tensor.dtype, tensor.device) != (place.shape, place.dtype, place.device):
        raise RuntimeError(
            f"a parameter was {place.dtype} {tuple(place.shape)} on {place.device} when its optimizer was built and is "
            f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device} now: move and convert the model first"
        )
