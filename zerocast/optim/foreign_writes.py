"""ForeignWrites: detects that other code has written or moved the parameters of a bucket.

A cast overwrites the weights with the values of the masters, so the next step would undo writes of
other code into the weights. The version counters of flat buffers and plain parameters show a write
at the cost of a comparison. A parameter whose storage was replaced (`.data =`, `Module.to`) is
compared with the bytes in the flat buffer. Writes that advance no counter (by `.data`, numpy or
kernels of other packages) are detected in debug mode only, with a copy.
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
    "the next step would overwrite these values by a cast of the FP32 masters. To change the masters, call "
    "zerocast.optim.load_masters(optimizer, high_precision_state), or optimizer.load_state_dict(state) after "
    "model.load_state_dict(...); for averages use zerocast.optim.EMA"
)


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


class ForeignWrites:
    """Compares the parameters of a bucket with their contents at the last call of `record`.

    `plain` and `quantized` are the views of all parameters in `flats`, the flat buffers.
    """

    def __init__(
        self,
        bucket: Bucket,
        flats: Sequence[Tensor],
        plain: Sequence[PlainView],
        quantized: Sequence[QuantizedViews],
    ) -> None:
        self._bucket = bucket
        self._flats = flats
        self._plain = plain
        self._quantized = quantized
        # The result of `_location` when all weights were last seen in the flat buffers.
        self._seen_in_buffers: tuple[Validity, int] | None = None
        # The tensors whose version counters are compared.
        self._watched = [*flats, *(p.slot.parameter for p in plain)]
        self.record()

    def record(self) -> None:
        """Record the current contents of the parameters, with which later checks compare."""
        self._versions = [tensor._version for tensor in self._watched]
        recording = self._flats[0].is_cuda and torch.cuda.is_current_stream_capturing()
        self._copies = [flat.clone() for flat in self._flats] if debugging() and not recording else []

    def check_unwritten(self) -> None:
        """Raise RuntimeError if parameters in their views were written since `record`."""
        copies = self._copies if debugging() else []
        unchanged = [tensor._version for tensor in self._watched] == self._versions
        if unchanged and all(same_bytes(*pair) for pair in zip(self._flats, copies, strict=False)):
            return
        noted = dict(zip(map(id, self._watched), self._versions, strict=True))
        names = [
            p.slot.name
            for p in self._plain
            if p.is_in_buffer and p.slot.parameter._version != noted[id(p.slot.parameter)]
        ]
        if copies:
            for slot in self._bucket.slots:
                views = zip(self._bucket.views(slot, self._flats), self._bucket.views(slot, copies), strict=True)
                if not all(same_bytes(*pair) for pair in views):
                    names.append(slot.name)
        elif any(flat._version != noted[id(flat)] for flat in self._flats):
            # A flat buffer has one counter, so any of its parameters may have been written.
            names += [slot.name for slot in self._bucket.slots]
        if names:
            raise RuntimeError(f"parameters were written since the last step, among {_some(names)}: {LOST}")

    def check_moved(self) -> bool:
        """Return True if parameters are stored outside of their views. Raises RuntimeError if they
        have different values there.
        """
        plain = [p for p in self._plain if not p.is_in_buffer]
        quantized = [q for q in self._quantized if q.weight.state is not q.state]
        location = self._location()
        if self._seen_in_buffers != location:
            quantized = [q for q in self._quantized if q.weight.state is not q.state or any(q.moved())]
        if not plain and not quantized:
            self._seen_in_buffers = location
            return False
        for p in plain:
            _check_fits(p.slot.parameter, p.view)
        names = [p.slot.name for p in plain if not same_bytes(p.slot.parameter, p.view)]
        names += [q.slot.name for q in quantized if q.differs()]
        if names:
            raise RuntimeError(
                f"parameters have a different storage and different values since the last step, {_some(names)}: {LOST}"
            )
        # `reclaim` moves them back.
        return True

    def _location(self) -> tuple[Validity, int] | None:
        """Return a value that compares equal as long as no weight has moved. All weights of a
        bucket have the validity of one plan, which counts moves.
        """
        if not self._quantized:
            return None
        validity = self._quantized[0].state.validity
        return validity, validity.places

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


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _check_fits(tensor: Tensor, view: Tensor) -> None:
    """Raise RuntimeError unless a tensor fits into a view."""
    if (tensor.shape, tensor.dtype, tensor.device) != (view.shape, view.dtype, view.device):
        raise RuntimeError(
            f"a parameter was {view.dtype} {tuple(view.shape)} on {view.device} when its optimizer was built and is "
            f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device} now: move and convert the model first"
        )
