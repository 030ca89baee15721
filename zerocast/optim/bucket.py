"""Buckets: parameters laid end to end, cut into equal shards, one for each rank.

A bucket holds parameters that are stored alike, so that the same cut is a cut of its gradients, of
its masters and of its bytes. Parameters start at multiples of `SHARD_ALIGNMENT_ELEMENTS` and shards
are multiples of it: no block row of 16, no byte and no vector load is ever cut.

Parameters that one rank is to own in whole lie in buckets of their own, whose cuts fall between
them (`whole.py`). Their gradients lie in others, which are cut evenly: `Layout` has both.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from zerocast.formats import Block, FormatSpec, get_format
from zerocast.formats.layout import (
    SHARD_ALIGNMENT_ELEMENTS,
    Shape,
    Span,
    buffers,
    elements_per_scale,
    matrix_shape,
    round_up,
)
from zerocast.optim.whole import Whole, batches, deal
from zerocast.weight import QuantizedWeight

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
    whole: bool = False  # one rank owns all of a parameter

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


def storage_of(parameter: Tensor, grad_dtype: torch.dtype | None, whole: bool = False) -> Storage:
    """The storage class of a parameter."""
    grad_dtype = grad_dtype or parameter.dtype
    if not isinstance(parameter, QuantizedWeight):
        return Storage(parameter.dtype, 1, 0, grad_dtype, whole=whole)
    storage = _storage_of(
        parameter.format, parameter.matrix_shape, parameter.dtype, parameter.rowwise_data.dtype, grad_dtype
    )
    return replace(storage, whole=True) if whole else storage


@functools.lru_cache(maxsize=1024)  # experts are many and have few shapes
def _storage_of(
    fmt: FormatSpec, matrix: Block, nominal: torch.dtype, code: torch.dtype, grad_dtype: torch.dtype
) -> Storage:
    scales = []
    for name, elements in elements_per_scale(fmt, matrix).items():
        buffer = buffers(fmt, matrix, nominal)[name]
        if buffer is not None and SHARD_ALIGNMENT_ELEMENTS % elements == 0:
            scales.append(FlatBuffer(name, buffer.dtype, elements))
    columnwise = fmt.elements_per_byte if fmt.casts_columnwise else 0
    return Storage(code, fmt.elements_per_byte, columnwise, grad_dtype, tuple(scales))


class Layout(NamedTuple):
    """Where the parameters of an optimizer lie on each rank.

    `buckets`: masters, the state of their updates and bytes. `gradients`: reduced gradients. The
    two are one, at the same places of the flat FP32 tensors, but for parameters that ranks own in
    whole, which lie behind the others. A bucket of theirs holds about one for each rank and would
    keep back as many gradients; so gradients are cut evenly whoever owns the parameter, in buckets
    of the usual size, and go to the owner when all of them are reduced (`gradient_exchange.py`).
    """

    buckets: list[Bucket]
    gradients: list[Bucket]


_Member = tuple[int, Slot]  # when a backward pass completes it, and a slot that has no offset yet


class _Unplaced(NamedTuple):
    """A bucket that a backward pass completes with parameter number `order`."""

    order: int
    storage: Storage
    slots: tuple[Slot, ...]
    shard_numel: int

    @staticmethod
    def cut(order: int, storage: Storage, slots: list[Slot], ranks: int) -> "_Unplaced":
        return _Unplaced(order, storage, tuple(slots), round_up(_end(slots), ranks * SHARD_ALIGNMENT_ELEMENTS) // ranks)


def lay_out(
    parameters: Iterable[tuple[str, Tensor, int]],
    bucket_size: int,
    ranks: int,
    grad_dtype: torch.dtype | None,
    costs: Mapping[str, int],
) -> Layout:
    """The layout of (name, parameter, param group) in registration order; buckets are in the order
    in which a backward pass completes them.

    `costs` names the parameters of which one rank owns all, and says what the update of each takes
    there.
    """
    cut: list[_Member] = []
    whole: list[_Member] = []
    for order, (name, parameter, param_group) in enumerate(reversed(list(parameters))):
        (whole if name in costs else cut).append((order, Slot(name, parameter, param_group, 0)))
    evenly = _cut(cut, bucket_size, ranks, lambda parameter: storage_of(parameter, grad_dtype))
    gradients = _cut(whole, bucket_size, ranks, lambda parameter: _gradient_storage(parameter, grad_dtype))
    owned = list(_dealt(whole, bucket_size, ranks, grad_dtype, costs))
    return Layout(_started(evenly, owned, ranks), _started(evenly, gradients, ranks))


def fill_buckets(
    parameters: Iterable[tuple[str, Tensor, int]], bucket_size: int, ranks: int, grad_dtype: torch.dtype | None
) -> list[Bucket]:
    """The buckets of parameters that all ranks share."""
    return lay_out(parameters, bucket_size, ranks, grad_dtype, {}).buckets


def _gradient_storage(parameter: Tensor, grad_dtype: torch.dtype | None) -> Storage:
    """Gradients of one dtype lie together, however their parameters are stored."""
    dtype = grad_dtype or parameter.dtype
    return Storage(dtype, 1, 0, dtype)


def _cut(
    members: Iterable[_Member], bucket_size: int, ranks: int, storage_of: Callable[[Tensor], Storage]
) -> list[_Unplaced]:
    """Buckets that are cut evenly, filled up to `bucket_size` elements."""
    filling: dict[Storage, list[Slot]] = {}
    complete: list[_Unplaced] = []
    last: dict[Storage, int] = {}
    for order, slot in members:
        storage = storage_of(slot.parameter)
        slots = filling.setdefault(storage, [])
        if slots and _end(slots) + slot.numel > bucket_size:
            complete.append(_Unplaced.cut(last[storage], storage, slots, ranks))
            slots = filling[storage] = []
        slots.append(replace(slot, offset=_end(slots)))
        last[storage] = order
    return complete + [_Unplaced.cut(last[storage], storage, slots, ranks) for storage, slots in filling.items()]


def _started(first: list[_Unplaced], behind: list[_Unplaced], ranks: int) -> list[Bucket]:
    """The buckets in the order of a backward pass; the flat tensors hold those of `behind` last."""
    starts, start = {}, 0
    for bucket in (*sorted(first, key=_order), *sorted(behind, key=_order)):
        starts[bucket.order], start = start, start + bucket.shard_numel
    complete = sorted((*first, *behind), key=_order)
    return [Bucket(b.storage, b.slots, b.shard_numel, ranks, starts[b.order]) for b in complete]


def _dealt(
    members: Iterable[_Member],
    bucket_size: int,
    ranks: int,
    grad_dtype: torch.dtype | None,
    costs: Mapping[str, int],
) -> Iterator[_Unplaced]:
    """The buckets of parameters that ranks own in whole."""
    whole: dict[Storage, list[Whole[Slot]]] = {}
    for order, slot in members:
        storage = storage_of(slot.parameter, grad_dtype, whole=True)
        whole.setdefault(storage, []).append(
            Whole(order, slot, round_up(slot.numel, SHARD_ALIGNMENT_ELEMENTS), costs[slot.name])
        )
    filled = [(storage, batch) for storage, alike in whole.items() for batch in batches(alike, bucket_size, ranks)]
    loads = [0] * ranks
    for storage, batch in sorted(filled, key=lambda pair: pair[1][-1].order):
        places, shard_numel = deal(batch, loads)
        slots = tuple(replace(member.item, offset=offset) for offset, member in places)
        yield _Unplaced(batch[-1].order, storage, slots, shard_numel)


def _order(bucket: _Unplaced) -> int:
    return bucket.order


def _end(slots: list[Slot]) -> int:
    return round_up(slots[-1].offset + slots[-1].numel, SHARD_ALIGNMENT_ELEMENTS) if slots else 0


def flat_numel(buckets: list[Bucket]) -> int:
    """Elements of one rank's flat FP32 tensors."""
    return sum(bucket.shard_numel for bucket in buckets)
