"""Buckets: concatenated parameters, split into equal shards, one for each rank.

The parameters of a bucket have the same storage, so that one split serves for its gradients, its
masters and its bytes. Parameters start at multiples of `SHARD_ALIGNMENT_ELEMENTS` and shards are
multiples of it, so that no block row of 16, no byte and no vector load is ever split.

Parameters that are owned by one rank are in separate buckets, whose shards end between parameters
(`lpt_assignment.py`). Their gradients are in other buckets, which are split evenly. `Layout` has
both.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from zerocast.distributed.lpt_assignment import AssignedParameter, assign_to_ranks, batches
from zerocast.formats import Block, FormatSpec, get_format
from zerocast.formats.element import dtype_name, torch_dtype
from zerocast.formats.layout import (
    SHARD_ALIGNMENT_ELEMENTS,
    Shape,
    Span,
    buffers,
    elements_per_scale,
    matrix_shape,
    round_up,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# The number of elements of a bucket, unless `ZeroConfig` has another one.
BUCKET_SIZE = 32 * 1024 * 1024
# The number of buckets of `bucket_size` elements that may be in flight at the same time, and of
# buckets that are each a larger weight (`most_in_flight`). Each holds its gradients and this rank's
# part of their mean, in the dtype in which gradients are reduced.
IN_FLIGHT = 8
LARGER_IN_FLIGHT = 4
IDENTITY = get_format("identity")


class FlatBuffer(NamedTuple):
    """The concatenated buffers of one kind of a bucket's weights.

    Attributes:
        name: the name of the weights' buffer.
        dtype: the name of its dtype.
        elements: the number of elements of a weight for each entry of the buffer.
    """

    name: str
    dtype: str
    elements: int


@dataclass(frozen=True)
class Storage:
    """The storage of a parameter and the reduction of its gradient. All parameters of a bucket have
    the same.

    Attributes:
        dtype: the name of the dtype of the flat buffer of rowwise codes, or of the values of plain
            parameters.
        elements_per_byte: the elements of a weight for each entry of that buffer.
        columnwise_elements: the same for columnwise codes; 0 if these are not gathered.
        reduced_as: the name of the dtype in which gradients are reduced.
        scales: the scales that are gathered with the codes. If there are none, every rank computes
            all scales.
        single_owner: True if one rank owns all of a parameter.
    """

    dtype: str
    elements_per_byte: int
    columnwise_elements: int
    reduced_as: str
    scales: tuple[FlatBuffer, ...] = ()
    single_owner: bool = False

    @functools.cached_property
    def grad_dtype(self) -> "torch.dtype":
        """The dtype in which gradients are reduced."""
        return torch_dtype(self.reduced_as)

    @property
    def codes(self) -> tuple[FlatBuffer, ...]:
        """The flat buffers of codes, one for each direction that is gathered."""
        rowwise = FlatBuffer("rowwise_data", self.dtype, self.elements_per_byte)
        if not self.columnwise_elements:
            return (rowwise,)
        return rowwise, FlatBuffer("columnwise_data", self.dtype, self.columnwise_elements)

    @property
    def gathered(self) -> tuple[FlatBuffer, ...]:
        """The flat buffers that are split into shards and gathered: codes, then scales."""
        return *self.codes, *self.scales


@dataclass(frozen=True)
class Slot:
    """The position of one parameter in a bucket, in elements."""

    name: str
    parameter: "Tensor"
    param_group: int
    offset: int

    @property
    def numel(self) -> int:
        """The number of elements, without padding."""
        return self.parameter.numel()

    @property
    def shape(self) -> Shape:
        """The logical shape; (1,) for a scalar."""
        return tuple(self.parameter.shape) or (1,)

    @property
    def matrix_shape(self) -> Block:
        """(rows, columns), with leading dimensions folded into the rows."""
        return matrix_shape(self.shape)

    @property
    def format(self) -> FormatSpec:
        """The format of the weight; identity for a plain parameter."""
        return format_of(self.parameter) or IDENTITY


@dataclass(frozen=True)
class Bucket:
    """Parameters that are sharded and communicated together.

    Attributes:
        slots: the parameters in the order of the backward pass.
        shard_numel: the elements of one rank's shard, padding included.
        start: the offset of this rank's shard in its flat FP32 tensors.
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
        """True if one parameter fills the bucket without padding, so that its gradient is sent
        without being copied into a flat buffer.
        """
        return self.slots[0].numel == self.numel

    def moved_by(self, numel: int) -> "Bucket":
        """Return the bucket with its shard the given number of elements later in the flat
        tensors.
        """
        return replace(self, start=self.start + numel)

    def shard(self, rank: int) -> Span:
        """Return the bucket's elements that `rank` owns."""
        return Span(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def cuts(self, slot: Slot) -> range | None:
        """Return the boundaries between shards within a parameter, in its elements, if its scales
        are gathered; otherwise None.
        """
        return self.boundaries(slot) if self.storage.scales else None

    def boundaries(self, slot: Slot) -> range:
        """Return the boundaries between shards within a parameter, in its elements."""
        return range(self.shard_numel - slot.offset % self.shard_numel, slot.numel, self.shard_numel)

    def views(self, slot: Slot, flats: "Sequence[Tensor]") -> "list[Tensor]":
        """Return the parts of the flat buffers `flats` that belong to a parameter."""
        gathered = zip(self.storage.gathered, flats, strict=True)
        return [flat[slot.offset // n : (slot.offset + slot.numel) // n] for (_, _, n), flat in gathered]

    def owned(self, slot: Slot, rank: int) -> tuple[Span, int]:
        """Return (elements of a parameter that `rank` owns, their offset in that rank's flat FP32
        tensors).
        """
        common = Span(slot.offset, slot.offset + slot.numel).intersect(self.shard(rank))
        first = min(common.start - slot.offset, slot.numel)
        return Span(first, first + common.numel), self.start + common.start - rank * self.shard_numel


def format_of(parameter: "Tensor") -> FormatSpec | None:
    """Return the format of a QuantizedWeight, or None for a plain parameter."""
    fmt = getattr(parameter, "format", None)
    return fmt if isinstance(fmt, FormatSpec) else None


def storage_of(parameter: "Tensor", grad_dtype: "torch.dtype | str | None", single_owner: bool = False) -> Storage:
    """Return the storage of a parameter."""
    nominal = dtype_name(parameter.dtype)
    reduced_as = dtype_name(grad_dtype or nominal)
    fmt = format_of(parameter)
    if fmt is None:
        return Storage(nominal, 1, 0, reduced_as, single_owner=single_owner)
    storage = _storage_of(fmt, tuple(parameter.shape), nominal, reduced_as)
    return replace(storage, single_owner=True) if single_owner else storage


# Cached, since a model may have many experts of few shapes.
@functools.lru_cache(maxsize=1024)
def _storage_of(fmt: FormatSpec, shape: Shape, nominal: str, reduced_as: str) -> Storage:
    by_name = buffers(fmt, shape, nominal)
    codes = by_name["rowwise_data"]
    assert codes is not None
    scales = []
    for name, elements in elements_per_scale(fmt, shape).items():
        buffer = by_name[name]
        if buffer is not None and SHARD_ALIGNMENT_ELEMENTS % elements == 0:
            scales.append(FlatBuffer(name, buffer.dtype_name, elements))
    columnwise = fmt.elements_per_byte if fmt.casts_columnwise else 0
    return Storage(codes.dtype_name, fmt.elements_per_byte, columnwise, reduced_as, tuple(scales))


class Layout(NamedTuple):
    """The buckets of an optimizer's parameters.

    For parameters that are each owned by one rank the two lists differ. Their buckets of masters
    have about one parameter for each rank. If gradients were reduced in the same buckets, the same
    number of them would be kept in memory until a bucket is complete. So gradients are split evenly
    in buckets of the usual size, and sent to the owner once all of them are reduced
    (`muon_step.py`). In the flat FP32 tensors these parameters come after all others, which
    have the same offsets in both lists.

    Attributes:
        buckets: the buckets of masters, of the state of their updates, and of bytes.
        gradients: the buckets of reduced gradients.
    """

    buckets: list[Bucket]
    gradients: list[Bucket]

    def adds_in_bf16(self, deterministic: bool, grad_wire: str | None) -> bool:
        """Return True if a collective adds all gradients in bf16, and none are sent to owners of
        full matrices.
        """
        in_bf16 = all(bucket.storage.reduced_as == "bfloat16" for bucket in self.buckets)
        is_whole = any(bucket.storage.single_owner for bucket in self.buckets)
        return in_bf16 and not (is_whole or deterministic or grad_wire)

    def extended(self, added: "Layout") -> "Layout":
        """Return the layout of these parameters and of `added` ones. All keep their shards. In the
        flat tensors the added ones follow the parameters that are split evenly, and the others.
        """
        cut, added_cut = (flat_numel([b for b in each.buckets if not b.storage.single_owner]) for each in (self, added))

        def extend(ours: list[Bucket], theirs: list[Bucket]) -> list[Bucket]:
            moved = [b.moved_by(added_cut if b.start >= cut else 0) for b in ours]
            end = flat_numel(ours)
            return moved + [b.moved_by(end if b.start >= added_cut else cut) for b in theirs]

        return Layout(extend(self.buckets, added.buckets), extend(self.gradients, added.gradients))


# (the number of a parameter in the order of a backward pass, its slot, which has no offset yet)
_Member = tuple[int, Slot]


class _Unplaced(NamedTuple):
    """A bucket without an offset in the flat tensors.

    Attributes:
        order: the number of the last of its parameters in the order of a backward pass.
    """

    order: int
    storage: Storage
    slots: tuple[Slot, ...]
    shard_numel: int

    @staticmethod
    def cut(order: int, storage: Storage, slots: list[Slot], ranks: int) -> "_Unplaced":
        """Return a bucket that is split evenly over `ranks`."""
        return _Unplaced(order, storage, tuple(slots), round_up(_end(slots), ranks * SHARD_ALIGNMENT_ELEMENTS) // ranks)


def lay_out(
    parameters: "Iterable[tuple[str, Tensor, int]]",
    bucket_size: int,
    ranks: int,
    grad_dtype: "torch.dtype | str | None",
    costs: Mapping[str, int],
) -> Layout:
    """Lay out (name, parameter, param group) in registration order. Buckets are in the order in
    which a backward pass completes them.

    `costs` has the parameters that are owned by one rank, keyed by name, with the work of their
    updates. Only the shape, the number of elements, the dtype and the format of a parameter are
    read, so `zerocast plan` passes stand-ins.
    """
    cut: list[_Member] = []
    whole: list[_Member] = []
    for order, (name, parameter, param_group) in enumerate(reversed(list(parameters))):
        members = whole if name in costs else cut
        members.append((order, Slot(name, parameter, param_group, 0)))
    evenly_cut = _cut(cut, bucket_size, ranks, lambda parameter: storage_of(parameter, grad_dtype))
    gradients = _cut(whole, bucket_size, ranks, lambda parameter: _gradient_storage(parameter, grad_dtype))
    owned_whole = list(_dealt(whole, bucket_size, ranks, grad_dtype, costs))
    return Layout(_placed(evenly_cut, owned_whole, ranks), _placed(evenly_cut, gradients, ranks))


def fill_buckets(
    parameters: "Iterable[tuple[str, Tensor, int]]", bucket_size: int, ranks: int, grad_dtype: "torch.dtype | None"
) -> list[Bucket]:
    """Return the buckets of parameters that all ranks share."""
    return lay_out(parameters, bucket_size, ranks, grad_dtype, {}).buckets


def _gradient_storage(parameter: "Tensor", grad_dtype: "torch.dtype | str | None") -> Storage:
    """Return the storage of a gradient, which depends on its dtype only."""
    dtype = dtype_name(grad_dtype or parameter.dtype)
    return Storage(dtype, 1, 0, dtype)


def _cut(
    members: Iterable[_Member], bucket_size: int, ranks: int, storage_of: "Callable[[Tensor], Storage]"
) -> list[_Unplaced]:
    """Fill buckets with up to `bucket_size` elements, and split them evenly."""
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


def _placed(first: list[_Unplaced], last: list[_Unplaced], ranks: int) -> list[Bucket]:
    """Give buckets their offsets in the flat tensors, `first` before `last`. Returns all of them in
    the order of a backward pass.
    """
    starts = {}
    start = 0
    for bucket in (*sorted(first, key=_order), *sorted(last, key=_order)):
        starts[bucket.order] = start
        start += bucket.shard_numel
    buckets = sorted((*first, *last), key=_order)
    return [Bucket(b.storage, b.slots, b.shard_numel, ranks, starts[b.order]) for b in buckets]


def _dealt(
    members: Iterable[_Member],
    bucket_size: int,
    ranks: int,
    grad_dtype: "torch.dtype | str | None",
    costs: Mapping[str, int],
) -> Iterator[_Unplaced]:
    """Yield the buckets of parameters that are each owned by one rank."""
    by_storage: dict[Storage, list[AssignedParameter[Slot]]] = {}
    for order, slot in members:
        storage = storage_of(slot.parameter, grad_dtype, single_owner=True)
        size = round_up(slot.numel, SHARD_ALIGNMENT_ELEMENTS)
        by_storage.setdefault(storage, []).append(AssignedParameter(order, slot, size, costs[slot.name]))
    filled = []
    for storage, parameters in by_storage.items():
        filled += [(storage, batch) for batch in batches(parameters, bucket_size, ranks)]
    loads = [0] * ranks
    for storage, batch in sorted(filled, key=lambda pair: pair[1][-1].order):
        placed, shard_numel = assign_to_ranks(batch, loads)
        slots = tuple(replace(member.item, offset=offset) for offset, member in placed)
        yield _Unplaced(batch[-1].order, storage, slots, shard_numel)


def _order(bucket: _Unplaced) -> int:
    return bucket.order


def _end(slots: list[Slot]) -> int:
    return round_up(slots[-1].offset + slots[-1].numel, SHARD_ALIGNMENT_ELEMENTS) if slots else 0


def most_in_flight(buckets: "Sequence[Bucket]", bucket_size: int) -> int:
    """Return the number of elements of gradients that may be in flight at the same time. A bucket
    with more may be in flight by itself.

    A compiled block produces all its gradients together, and they are reduced while the next block
    is computed only if all of them may be in flight. Most elements of a large block are in the
    three matrices of its MLP, which have one size. The embedding and the head may be larger. So the
    fourth largest bucket counts, and four times its elements are more than a block has.
    """
    sizes = sorted((bucket.numel for bucket in buckets), reverse=True)
    larger = LARGER_IN_FLIGHT * sizes[LARGER_IN_FLIGHT - 1] if len(sizes) >= LARGER_IN_FLIGHT else 0
    return max(IN_FLIGHT * bucket_size, larger)


def flat_numel(buckets: list[Bucket]) -> int:
    """Return the number of elements of one rank's flat FP32 tensors."""
    return sum(bucket.shard_numel for bucket in buckets)
