"""Buckets: parameters laid end to end, cut into equal shards, one for each rank.

A bucket holds parameters that are stored alike, so that the same cut is a cut of its gradients, of
its masters and of its bytes. Parameters start at multiples of `ALIGNMENT` elements and shards are
multiples of it: no block row of 16, no byte and no vector load is ever cut.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zerocast.formats import Block, FormatSpec, get_format
from zerocast.formats.layout import Shape, Span, buffers, elements_per_scale, matrix_shape, round_up
from zerocast.weight import QuantizedWeight

ALIGNMENT = 128
IDENTITY = get_format("identity")


class FlatBuffer(NamedTuple):
    """The buffers `name` of a bucket's weights, end to end, with an entry for every so many
    elements.
    """

    name: str
    dtype: torch.dtype
    elements: int


@dataclass(frozen=True)
class Storage:
    """How a parameter is stored and its gradient reduced; parameters of one bucket agree in it."""

    dtype: torch.dtype  # of the flat buffer
    elements_per_byte: int
    columnwise_elements: int  # of a byte, where columnwise codes are gathered too; else 0
    grad_dtype: torch.dtype
    scales: tuple[FlatBuffer, ...] = ()  # gathered too; else every rank computes all scales

    @property
    def codes(self) -> tuple[FlatBuffer, ...]:
        """The flat buffers of codes, one for each direction that is gathered."""
        rowwise = FlatBuffer("rowwise_data", self.dtype, self.elements_per_byte)
        if not self.columnwise_elements:
            return (rowwise,)
        return rowwise, FlatBuffer("columnwise_data", self.dtype, self.columnwise_elements)

    @property
    def gathered(self) -> tuple[FlatBuffer, ...]:
        """The flat buffers that are cut into shards and gathered: codes, then scales."""
        return *self.codes, *self.scales


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket, in elements."""

    name: str
    parameter: Tensor
    param_group: int
    offset: int

    @property
    def numel(self) -> int:
        """The number of elements, without padding."""
        return self.parameter.numel()

    @property
    def shape(self) -> Shape:
        """Logical shape; that of a scalar is (1,)."""
        return tuple(self.parameter.shape) or (1,)

    @property
    def matrix_shape(self) -> Block:
        """(rows, columns), with leading dimensions folded into the rows."""
        return matrix_shape(self.shape)

    @property
    def format(self) -> FormatSpec:
        """Identity for a plain parameter."""
        return self.parameter.format if isinstance(self.parameter, QuantizedWeight) else IDENTITY

    def live_weight(self) -> QuantizedWeight:
        """The parameter where it lies now; a plain one as an identity weight over its storage."""
        if isinstance(self.parameter, QuantizedWeight):
            return self.parameter
        matrix = self.parameter.detach().reshape(-1, self.shape[-1])
        return QuantizedWeight.of_buffers(self.shape, IDENTITY, matrix.dtype, {"rowwise_data": matrix})


@dataclass(frozen=True)
class Bucket:
    """Slots in the order of the backward pass. `start` is where this rank's shard lies in the
    flat FP32 tensors.
    """

    storage: Storage
    slots: tuple[Slot, ...]
    shard_numel: int
    ranks: int
    start: int

    @property
    def numel(self) -> int:
        """Elements of all shards, padding included."""
        return self.shard_numel * self.ranks

    @property
    def is_one_gradient(self) -> bool:
        """True if one parameter fills it without padding: its gradient is sent as it lies."""
        return self.slots[0].numel == self.numel

    def shard(self, rank: int) -> Span:
        """The bucket's elements that `rank` owns."""
        return Span(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def cuts(self, slot: Slot) -> range | None:
        """Where shards meet within a parameter whose scales are gathered, in its elements; None for
        any other.
        """
        if not self.storage.scales:
            return None
        return range(self.shard_numel - slot.offset % self.shard_numel, slot.numel, self.shard_numel)

    def views(self, slot: Slot, flats: Sequence[Tensor]) -> list[Tensor]:
        """The parts of the flat buffers `flats` in which a parameter lies."""
        gathered = zip(self.storage.gathered, flats, strict=True)
        return [flat[slot.offset // n : (slot.offset + slot.numel) // n] for (_, _, n), flat in gathered]

    def owned(self, slot: Slot, rank: int) -> tuple[Span, int]:
        """The elements of a parameter that `rank` owns, and where they start in that rank's flat
        FP32 tensors.
        """
        common = Span(slot.offset, slot.offset + slot.numel).intersect(self.shard(rank))
        first = min(common.start - slot.offset, slot.numel)
        return Span(first, first + common.numel), self.start + common.start - rank * self.shard_numel


def storage_of(parameter: Tensor, grad_dtype: torch.dtype | None) -> Storage:
    """The storage class of a parameter."""
    grad_dtype = grad_dtype or parameter.dtype
    if not isinstance(parameter, QuantizedWeight):
        return Storage(parameter.dtype, 1, 0, grad_dtype)
    return _storage_of(
        parameter.format, parameter.matrix_shape, parameter.dtype, parameter.rowwise_data.dtype, grad_dtype
    )


@functools.lru_cache(maxsize=1024)  # experts are many and have few shapes
def _storage_of(
    fmt: FormatSpec, matrix: Block, nominal: torch.dtype, code: torch.dtype, grad_dtype: torch.dtype
) -> Storage:
    scales = []
    for name, elements in elements_per_scale(fmt, matrix).items():
        buffer = buffers(fmt, matrix, nominal)[name]
        if buffer is not None and ALIGNMENT % elements == 0:
            scales.append(FlatBuffer(name, buffer.dtype, elements))
    columnwise = fmt.halves[-1].elements_per_byte if fmt.casts_columnwise else 0
    return Storage(code, fmt.elements_per_byte, columnwise, grad_dtype, tuple(scales))


def fill_buckets(
    parameters: Iterable[tuple[str, Tensor, int]], bucket_size: int, ranks: int, grad_dtype: torch.dtype | None
) -> list[Bucket]:
    """Buckets for (name, parameter, param group) in registration order, in the order in which a
    backward pass completes them.
    """
    filling: dict[Storage, list[Slot]] = {}
    complete: list[tuple[int, Storage, list[Slot]]] = []
    last: dict[Storage, int] = {}
    for order, (name, parameter, param_group) in enumerate(reversed(list(parameters))):
        storage = storage_of(parameter, grad_dtype)
        slots = filling.setdefault(storage, [])
        end = _end(slots)
        if slots and end + parameter.numel() > bucket_size:
            complete.append((last[storage], storage, slots))
            slots = filling[storage] = []
        slots.append(Slot(name, parameter, param_group, _end(slots)))
        last[storage] = order
    complete += [(last[storage], storage, slots) for storage, slots in filling.items()]
    buckets, start = [], 0
    for _, storage, slots in sorted(complete, key=lambda item: item[0]):
        shard_numel = round_up(_end(slots), ranks * ALIGNMENT) // ranks
        buckets.append(Bucket(storage, tuple(slots), shard_numel, ranks, start))
        start += shard_numel
    return buckets


def _end(slots: list[Slot]) -> int:
    return round_up(slots[-1].offset + slots[-1].numel, ALIGNMENT) if slots else 0


def flat_numel(buckets: list[Bucket]) -> int:
    """Elements of one rank's flat FP32 tensors."""
    return sum(bucket.shard_numel for bucket in buckets)
