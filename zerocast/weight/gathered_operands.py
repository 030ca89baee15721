"""GatheredOperands: the operands that products read in place of the codes of weights that are
gathered together, made for all of them by one launch.

An operand is a columnwise copy of a weight, or its FP8 values if its format is exact in FP8. A
product needs its operand only while it runs, but making operands one at a time costs a CPU call and
a GPU launch for each weight. So the first product that asks makes the operands of all weights whose
operands were used in the last round. Each operand is given to one product, which then owns it: a
compiled graph may write into it. Operands take at most one byte per element of one gather's
weights, and never outlive the gathered codes (`end_round`).

A product finds its operand by the storage of the codes that it reads and their offset there. A
compiled graph knows nothing else of a weight: it passes plain tensors, and equal layers share a
graph.
"""

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerocast import backends
from zerocast.backends import ops
from zerocast.formats import Block, Columnwise, FormatSpec
from zerocast.formats.memory import check_storage
from zerocast.weight.state import WeightState

# (codes, scales). The scales are empty if one scale per tensor serves both directions.
Operand = tuple[Tensor, Tensor]

# (reference to GatheredOperands, index of the weight) of gathered codes. `type(None)` is called
# like a reference to nothing.
_Entry = tuple[Callable[[], "GatheredOperands | None"], int]
_NOT_GATHERED: _Entry = type(None), 0
# The attribute of the storage of gathered codes: a dict from the offset of a weight's codes to its
# _Entry.
_ATTRIBUTE = "zerocast_operands"
_NOTHING: dict[int, _Entry] = {}
# The number of the current stream of a device, without a Stream object.
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


def take_gathered_operand(data: Tensor, columnwise: bool) -> Operand | None:
    """Return the operand of one direction of the weight whose rowwise codes are `data`, made with
    the operands of its group, and give it up: the caller owns and frees it. None if the weight is
    not gathered together with others, or if these are the codes of one of its experts.
    """
    entries = getattr(data.untyped_storage(), _ATTRIBUTE, _NOTHING)
    reference, index = entries.get(data.storage_offset(), _NOT_GATHERED)
    operands = reference()
    return None if operands is None or data.shape != operands.shapes[index] else operands.pop(index, columnwise)


def forget_operands(data: Tensor) -> None:
    """Free the operands that were made of the rowwise codes `data` of a weight before they were
    written.
    """
    reference, _ = getattr(data.untyped_storage(), _ATTRIBUTE, _NOTHING).get(data.storage_offset(), _NOT_GATHERED)
    operands = reference()
    if operands is not None:
        operands.end_round()


class _Launch(NamedTuple):
    """The inputs of a launch for some of the weights, as parallel lists.

    Attributes:
        ends: the byte in its storage at which each of `data` and of `scale_inv` ends.
    """

    data: list[Tensor]
    scale_inv: list[Tensor]
    amaxes: list[Tensor]
    shapes: tuple[Block, ...]
    ends: list[Any]

    def check_memory(self) -> None:
        """Raise ValueError if some memory was freed. A launch for one weight reads the memory of
        others too.
        """
        tensors = self.data + self.scale_inv
        sizes = map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors))
        if any(map(operator.lt, sizes, self.ends)):
            for tensor in tensors:
                check_storage("a gathered buffer", tensor)


class _Round:
    """The operands of one direction in one pass over the weights.

    Attributes:
        asked: the indices of the weights whose operands were made in this round.
        made: the operands that no product has taken yet, keyed by index.
        last_asked: the indices whose operands a product took in the last round that made any.
        stream: the CUDA stream that wrote `made`. Another one must not read them.
    """

    def __init__(self) -> None:
        self.asked: set[int] = set()
        self.made: dict[int, Operand] = {}
        self.last_asked: set[int] = set()
        self.stream: object = None

    def wanted(self, index: int) -> tuple[int, ...]:
        """Return the indices to make operands for when `index` has none. The first request of a
        round also prefetches the operands that the last round used. A later miss makes `index`
        only.
        """
        wanted = {index} if self.asked else {index, *self.last_asked}
        self.asked |= wanted
        return tuple(sorted(wanted))

    def end(self) -> None:
        """Free the operands that no product has asked for."""
        self.last_asked = self.asked - self.made.keys()
        self.asked = set()
        self.made.clear()


class GatheredOperands:
    """The operands of weights of one format that are gathered together, into the same storage each
    time.

    Attributes:
        shapes: the shapes of their rowwise codes.

    Args:
        states: the weights. Their rowwise codes stay where they are, as long as this lives.
    """

    def __init__(self, fmt: FormatSpec, states: Sequence[WeightState]) -> None:
        self._format = fmt
        self._states = states
        self.shapes = [state.rowwise_data.shape for state in states]
        self._device = states[0].rowwise_data.device
        self._backend = backends.choose(self._device)
        self._rounds = {False: _Round(), True: _Round()}
        self._launches: dict[tuple[int, ...], _Launch] = {}
        # Kept, since an attribute lives on the Python object of a storage.
        self._storages: list[Any] = [state.rowwise_data.untyped_storage() for state in states]
        for index, (state, storage) in enumerate(zip(states, self._storages, strict=True)):
            entries = vars(storage).setdefault(_ATTRIBUTE, {})
            entries[state.rowwise_data.storage_offset()] = weakref.ref(self), index

    @staticmethod
    def by_format(states: Sequence[WeightState]) -> "list[GatheredOperands]":
        """Return one GatheredOperands per format. Formats whose products read only gathered codes
        have none.
        """
        by_format: dict[FormatSpec, list[WeightState]] = {}
        for state in states:
            if state.format.is_exact_in_fp8 or state.format.columnwise is Columnwise.TRANSPOSE:
                by_format.setdefault(state.format, []).append(state)
        return [GatheredOperands(fmt, of_format) for fmt, of_format in by_format.items()]

    def pop(self, index: int, columnwise: bool) -> Operand:
        """Return the operand of a weight, which belongs to the caller."""
        direction_round = self._rounds[columnwise]
        if self._device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                # A graph may be replayed without those that were captured before it, so it launches
                # what it reads.
                return self._make((index,), columnwise)[0]
            stream = _current_stream(self._device.index)
            if stream != direction_round.stream:
                if direction_round.asked:
                    direction_round.end()
                direction_round.stream = stream
        operand = direction_round.made.pop(index, None)
        if operand is None:
            indices = direction_round.wanted(index)
            direction_round.made.update(zip(indices, self._make(indices, columnwise), strict=True))
            operand = direction_round.made.pop(index)
        return operand

    def end_round(self) -> None:
        """Free the operands that no product has taken: the weights were gathered again or written
        to, their codes are freed, or a backward pass over them has ended.
        """
        for direction_round in self._rounds.values():
            if direction_round.asked:
                direction_round.end()

    def _make(self, indices: tuple[int, ...], columnwise: bool) -> list[Operand]:
        launch = self._launches.get(indices)
        if launch is None:
            launch = self._launches[indices] = self._launch(indices)
        launch.check_memory()
        data, scale_inv, amaxes, shapes, _ = launch
        key = str(self._format)
        if self._format.is_exact_in_fp8:
            return ops.upcast_together(self._backend, key, data, scale_inv, amaxes, shapes, columnwise)
        assert columnwise
        return ops.transposed_together(self._backend, key, data, scale_inv, shapes)

    def _launch(self, indices: Sequence[int]) -> _Launch:
        states = [self._states[index] for index in indices]
        data = [state.rowwise_data for state in states]
        scale_inv, amaxes = (
            [buffer for state in states if (buffer := state.buffers[name]) is not None]
            for name in ("rowwise_scale_inv", "amax")
        )
        tensors = data + scale_inv
        ends = [(tensor.storage_offset() + tensor.numel()) * tensor.itemsize for tensor in tensors]
        if not self._format.exact_scales:
            amaxes = []
        return _Launch(data, scale_inv, amaxes, tuple(state.matrix_shape for state in states), ends)
