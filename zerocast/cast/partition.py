"""MasterShard: a weight and the part of its master that this rank owns. Partition: the shards of
all weights of a plan, checked on all ranks together.

Each rank checks its arguments. Then all ranks compare digests of them, and raise together or not at
all, so a mistake on one rank is an error on every rank and never a hang. At the end they exchange
who owns which elements (`zerocast.distributed.ownership`). Nothing here reads or writes weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zerocast import backends
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.group import Group
from zerocast.distributed.ownership import Item, Ownership, exchange_spans
from zerocast.formats import Columnwise
from zerocast.formats.layout import Span, byte_range, elements_per_scale, round_up
from zerocast.formats.memory import check_storage
from zerocast.weight import QuantizedWeight
from zerocast.weight.owners import Claim, check_unclaimed

ShardData = Tensor | tuple[Tensor, Tensor]
# Scale buffers are padded to a multiple of this number of rows at most.
ROW_PADDING = 128


@dataclass(frozen=True)
class MasterShard:
    """A weight, and the part of its master that this rank owns.

    Attributes:
        weight: the weight.
        master: the flat master of the owned elements; None where this rank owns none.
        span: the owned elements.
        shard_data: storage for the owned codes only. None if a cast writes the codes of the weight.
        cuts: the elements at which a rank's span ends and the next begins, if the caller gathers
            scales too.
    """

    weight: QuantizedWeight
    master: Tensor | None
    span: Span
    shard_data: ShardData | None = None
    cuts: range | None = None

    @property
    def on_cpu(self) -> bool:
        """True if the master is in CPU memory, and the weight on another device."""
        return self.master is not None and is_on_cpu(self.master, self.weight.device)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The separate shard storage by direction, rowwise first; empty without any."""
        if self.shard_data is None:
            return ()
        return self.shard_data if isinstance(self.shard_data, tuple) else (self.shard_data,)

    def matrices(self) -> "list[MasterShard]":
        """Return the shards of the matrices that the weight is stored in, in their order. These are
        the matrices of experts if a block would otherwise span two of them. Every other weight is
        stored as one matrix, and the result is this shard.
        """
        count, (rows, columns) = self.weight.stored_matrices
        if count == 1:
            return [self]
        size = rows * columns
        return [
            self._of_matrix(weight, Span(index * size, (index + 1) * size))
            for index, weight in enumerate(self.weight.matrices())
        ]

    def _of_matrix(self, weight: QuantizedWeight, elements: Span) -> "MasterShard":
        """Return the shard of one matrix, which has these elements of the weight."""
        own = self.span.intersect(elements)
        if self.master is None or not own.numel:
            return MasterShard(weight, None, Span(0, 0))
        master = self.master[own.start - self.span.start : own.stop - self.span.start]
        # A matrix begins at a byte, and shard storage begins with the byte of the first element.
        first, last = byte_range(weight.format, self.weight.shape, own, weight.dtype)
        origin, _ = byte_range(weight.format, self.weight.shape, self.span, weight.dtype)
        stored: Any = tuple(data.view(-1)[first - origin : last - origin] for data in self.stored)
        span = Span(own.start - elements.start, own.stop - elements.start)
        return MasterShard(weight, master, span, stored or None)

    @property
    def rows(self) -> Span:
        """The rows that this rank computes scales of: all, or those around its span if scales are
        gathered. Both ends are at multiples of ROW_PADDING or at the end of the weight, so the
        scale buffers can be split there.
        """
        height, columns = self.weight.matrix_shape
        if self.cuts is None:
            return Span(0, height)
        first, last = self.span.start // columns, -(-self.span.stop // columns)
        return Span(first // ROW_PADDING * ROW_PADDING, min(round_up(last, ROW_PADDING), height))


@dataclass(frozen=True)
class Partition:
    """The shards of this rank, and the owners of all elements.

    Attributes:
        shards: one for each weight.
        ownership: the owners on all ranks.
        device: the device of the weights.
        backend: the name of the backend that casts there.
    """

    shards: list[MasterShard]
    ownership: Ownership
    device: torch.device
    backend: str

    def why_format_is_fixed(self, index: int) -> str | None:
        """Return the reason why casts cannot fill the weight in a different format. None if they
        can.
        """
        shard = self.shards[index]
        if not self.ownership.covers(index):
            return "some of its elements have no master on any rank"
        if shard.shard_data is not None or shard.cuts is not None:
            return "its shard is in storage that the caller laid out for this format (fsdp_shard_model_weights, scale_cuts)"
        return "a host keeps its amax history" if shard.weight.state.external_scaling_state else None

    def move(
        self,
        master_weights: Sequence[Tensor | None],
        shard_data: Sequence[ShardData | None] | None,
    ) -> None:
        """Use masters in different storage, and different shard storage unless `shard_data` is
        None. Raises ValueError or TypeError, with nothing changed, for masters of different spans.
        """
        data = [shard.shard_data for shard in self.shards] if shard_data is None else shard_data
        moved = []
        for index, (shard, master, part) in enumerate(zip(self.shards, master_weights, data, strict=True)):
            try:
                moved.append(replace(_check_shard(shard.weight, master, shard.span.start, part), cuts=shard.cuts))
            except (TypeError, ValueError) as error:
                raise type(error)(f"weight {index} ({_fingerprint(shard.weight)}): {error}") from None
            if moved[-1].span.numel != shard.span.numel:
                raise ValueError(
                    f"weight {index} ({_fingerprint(shard.weight)}): this plan was built for a master of {shard.span.numel} "
                    f"elements from {shard.span.start} on, got {moved[-1].span.numel}; ranks agree on spans when they build a plan"
                )
        _check_cpu_masters(moved)
        _check_apart(moved)
        self.shards[:] = moved

    def check_again(self) -> None:
        """Check weights, masters and shard storage, since `.data =` gives them any memory."""
        self.move([shard.master for shard in self.shards], None)


def partition(
    group: Group,
    model_weights: Sequence[Any],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    shard_data: Sequence[ShardData | None] | None,
    backend: str | None,
    scale_cuts: Sequence[range | None] | None = None,
    *,
    is_overridable: Callable[[Claim], bool] = lambda _: False,
) -> Partition:
    """Check the arguments of a plan on all ranks. This is the only communication of a plan before
    its casts.

    Raises the error of any rank on every rank, with the rank in the message if there are several:
    TypeError or ValueError for an argument, RuntimeError for a backend that cannot be used,
    ValueError for a claim on these elements for which `is_overridable` is False.
    """
    shards: list[MasterShard] = []
    problem, device, chosen = None, torch.device("cpu"), ""
    try:
        shards = _check(model_weights, master_weights, start_offsets, shard_data, scale_cuts)
        device = shards[0].weight.device if shards else torch.device("cpu")
        chosen = backends.choose(device, backend)
        check_unclaimed([(shard.weight.state, [shard.span]) for shard in shards], is_overridable)
    except Exception as error:  # Of any kind: the other ranks must raise too.
        problem = error
    lines = [_fingerprint(shard.weight, shard.cuts) for shard in shards]
    validate_across_ranks(group, lines, problem, "builds a CastPlan")
    weights = [shard.weight for shard in shards]
    items = [Item(w.numel(), w.format.elements_per_byte, line) for w, line in zip(weights, lines, strict=True)]
    return Partition(shards, exchange_spans(group, items, [shard.span for shard in shards]), device, chosen)


def is_on_cpu(master: Tensor, device: torch.device) -> bool:
    """Return True for a master in CPU memory of a weight on another device."""
    return master.device.type == "cpu" and device.type not in ("cpu", "meta")


def _check_cpu_masters(shards: Sequence[MasterShard]) -> None:
    """Raise ValueError or RuntimeError if masters are in CPU memory and no cast can read them
    there.
    """
    if not any(shard.on_cpu for shard in shards):
        return
    if any(shard.cuts is not None for shard in shards):
        raise ValueError(
            "scale_cuts is not supported with masters in CPU memory: move the masters to the weights' device"
        )
    reason = backends.why_not("cpu", torch.device("cpu"))
    if reason:
        raise RuntimeError(f"masters in CPU memory are cast by the backend 'cpu', which cannot be used: {reason}")


def _fingerprint(weight: QuantizedWeight, cuts: range | None = None) -> str:
    """Return the properties of a weight that all ranks must share."""
    shared = f" with the amax of {weight.state.shared_amax}" if weight.state.shared_amax else ""
    gradients = " with FP8 weight gradients" if weight.state.fp8_weight_gradients else ""
    gathered = "" if cuts is None else f" with gathered scales, cut at {cuts}"
    return f"{weight.format} {tuple(weight.shape)} {weight.dtype}{shared}{gradients}{gathered}"


def _check(
    model_weights: Sequence[Any],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    shard_data: Sequence[ShardData | None] | None,
    scale_cuts: Sequence[range | None] | None,
) -> list[MasterShard]:
    lists = {"model_weights": model_weights, "master_weights": master_weights, "start_offsets": start_offsets}
    for name, argument in lists.items():
        if not isinstance(argument, Sequence):
            raise TypeError(f"{name} is a list with one entry per weight, got a {type(argument).__name__}")
    data = [None] * len(model_weights) if shard_data is None else shard_data
    cuts = [None] * len(model_weights) if scale_cuts is None else scale_cuts
    if len({len(model_weights), len(master_weights), len(start_offsets), len(data), len(cuts)}) > 1:
        raise ValueError(
            f"lists differ in length: {len(model_weights)} model weights, {len(master_weights)} master weights, "
            f"{len(start_offsets)} start offsets, {len(data)} shard tensors, {len(cuts)} scale cuts"
        )
    _check_weights(model_weights)
    shards = []
    of_each = zip(model_weights, master_weights, start_offsets, data, cuts, strict=True)
    for index, (weight, master, start, part, cut) in enumerate(of_each):
        try:
            shards.append(_with_cuts(_check_shard(weight, master, start, part), cut))
        except (TypeError, ValueError) as error:
            raise type(error)(f"weight {index} ({_fingerprint(weight)}): {error}") from None
    devices = {shard.weight.device for shard in shards}
    if len(devices) > 1:
        raise ValueError(f"the weights of one plan are on one device, got {sorted(map(str, devices))}")
    if torch.device("meta") in devices:
        raise ValueError(
            "the weights are on the meta device: allocate their storage (to_empty) before the plan is built"
        )
    _check_cpu_masters(shards)
    _check_apart(shards)
    return shards


def _check_weights(model_weights: Sequence[Any]) -> None:
    """Raise TypeError for anything but a QuantizedWeight."""
    for index, weight in enumerate(model_weights):
        if not isinstance(weight, QuantizedWeight) or weight.transposed_of is not None:
            raise TypeError(f"model weight {index} is a {type(weight).__name__}, a QuantizedWeight is needed")


def _check_apart(shards: Sequence[MasterShard]) -> None:
    """Raise ValueError if a cast of one weight would write bytes of another one, or of a master.

    Masters may share memory, since a cast only reads them. So may the amaxes and scales of delayed
    scaling, which a host keeps for several weights.
    """
    seen: dict[int, int] = {}
    ranges: list[tuple[Tensor, str]] = []
    for index, shard in enumerate(shards):
        first = seen.setdefault(id(shard.weight.state), index)
        if first != index:
            raise ValueError(f"model weights {first} and {index} are the same weight")
        buffers: dict[str, Tensor | None] = dict(shard.weight.state.buffers)
        buffers.update(zip(("rowwise_data", "columnwise_data"), shard.stored, strict=False))
        for name, tensor in buffers.items():
            if tensor is not None and name.endswith(("_data", "_scale_inv")):
                ranges.append((tensor, f"model weight {index}"))
        if shard.master is not None:
            ranges.append((shard.master, "a master"))
    furthest, by = 0, ""
    places = [(tensor.data_ptr(), tensor.numel() * tensor.itemsize, what) for tensor, what in ranges]
    for start, size, what in sorted(place for place in places if place[1]):
        if start < furthest and what != by:
            raise ValueError(
                f"{by} and {what} share memory, so a cast would write one over the other: give each weight bytes of its own"
            )
        furthest, by = max((furthest, by), (start + size, what))


def _with_cuts(shard: MasterShard, cuts: range | None) -> MasterShard:
    if cuts is None:
        return shard
    weight, span = shard.weight, shard.span
    entries = elements_per_scale(weight.format, weight.shape)
    if not entries or any(cut % n for n in entries.values() for cut in (cuts.start, cuts.step)):
        raise ValueError(f"these scales cannot be gathered in parts that end at {cuts}")
    if not {span.start, span.stop} <= {0, weight.numel(), *cuts}:
        raise ValueError(
            f"elements [{span.start}, {span.stop}) are not between the boundaries {cuts} of gathered scales"
        )
    return replace(shard, cuts=cuts)


def _check_shard(
    weight: QuantizedWeight, master: Tensor | None, start: int | None, data: ShardData | None
) -> MasterShard:
    _check_memory(weight.state.buffers)
    if master is None:
        return MasterShard(weight, None, Span(0, 0))
    _check_master(master, weight)
    if master.numel() == 0:
        return MasterShard(weight, None, Span(0, 0))
    _check_memory({"the master": master})
    if type(start) is not int:
        raise ValueError(f"a master of {master.numel()} elements needs its start offset as an int, got {start!r}")
    span = Span(start, start + master.numel())
    if start < 0 or span.stop > weight.numel():
        raise ValueError(f"elements [{span.start}, {span.stop}) are not inside the weight's {weight.numel()}")
    return MasterShard(weight, master, span, _check_shard_data(weight, span, data))


def _check_master(master: Tensor, weight: QuantizedWeight) -> None:
    if not isinstance(master, Tensor):
        raise TypeError(f"the master is a {type(master).__name__}, a tensor or None is needed")
    if master.dtype not in (torch.float32, weight.dtype):
        raise TypeError(f"the master is {master.dtype}; float32 or the nominal {weight.dtype} is needed")
    if master.layout is not torch.strided:
        raise ValueError(f"the master is flat and contiguous, got layout {master.layout}")
    if master.dim() != 1 or not master.is_contiguous():
        raise ValueError(
            f"the master is flat and contiguous, got shape {tuple(master.shape)} and strides {master.stride()}"
        )
    # Backends read its memory, which holds the values without their sign.
    if master.is_neg():
        raise ValueError("the master is a view with a pending negation: pass master.resolve_neg()")
    if master.device != weight.device and not is_on_cpu(master, weight.device):
        raise ValueError(f"the master is on {master.device} and the weight on {weight.device}")


def _check_memory(tensors: Mapping[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            check_storage(name, tensor)


def _check_shard_data(weight: QuantizedWeight, span: Span, data: ShardData | None) -> ShardData | None:
    if data is None:
        return None
    directions = 2 if weight.format.columnwise is Columnwise.OWN_GRID else 1
    tensors = data if isinstance(data, tuple) else (data,)
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise TypeError(f"shard storage is a tensor, or two, got {', '.join(type(t).__name__ for t in tensors)}")
    if len(tensors) != directions:
        raise TypeError(f"the shard of a {weight.format} weight has {directions} tensors, got {len(tensors)}")
    first, last = byte_range(weight.format, weight.shape, span, weight.dtype)
    for tensor in tensors:
        if tensor.dtype != weight.rowwise_data.dtype or not tensor.is_contiguous() or tensor.device != weight.device:
            raise ValueError(
                f"shard storage is contiguous {weight.rowwise_data.dtype} on {weight.device}, got {tensor.dtype} "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
        if tensor.numel() * tensor.element_size() < last - first:
            raise ValueError(
                f"the shard needs {last - first} bytes, its storage has {tensor.numel() * tensor.element_size()}"
            )
        check_storage("shard storage", tensor)
    return data
