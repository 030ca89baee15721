"""The bytes of one rank by sharding: buckets of a ZeroAdamW, or row shards of FSDP2 and HSDP.

ZeroAdamW: its own buckets, laid out over meta tensors. The gradients of stage 2 are the FP32 shard
and the buckets in flight, for a backward pass that completes parameters in reverse order of
registration (../optim/README.md). Stage 1 also keeps all gradients of this rank. Columnwise copies
are those of all weights where they are kept, else the largest one, for the product that reads it.

FSDP2 and HSDP: every parameter is cut along its first dimension, as torch's `fully_shard` cuts it.
Every block is a unit that is resharded after its forward pass and gathered again for its backward
pass; parameters outside of blocks form the root, gathered once. The FP32 shard is the parameter;
next to it lie the scales of its blocks, and the codes of the unit that is being gathered, or all
codes where they are kept: few of them, or a shard group of one rank. At the peak the root and two
blocks are unsharded, the one that computes and the next one, with one columnwise copy, and the
gradients of two units.

Traffic is that of a step with one micro-batch and with the norm of gradients; norms of
`zerocast.fsdp2` are torch's.
"""

import functools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zerocast.cast.cut_blocks import cut_rows_of
from zerocast.cast.flat_buffer import ALIGNMENT
from zerocast.cast.packed_amax import cut_rows
from zerocast.footprint.network import Collective
from zerocast.footprint.shapes import ROOT
from zerocast.formats import Columnwise
from zerocast.formats.layout import Buffer, GradientMessage, amax_counts, buffers, exchange_unit, round_up
from zerocast.fsdp2.gather_layout import MOST_KEPT, GatherLayout
from zerocast.fsdp2.shard import RowShards, ShardGeometry
from zerocast.optim import ZeroConfig
from zerocast.optim.bucket import Bucket, FlatBuffer, Slot, fill_buckets, flat_numel
from zerocast.weight import QuantizedWeight

FP32, FP64 = torch.float32.itemsize, torch.float64.itemsize
SCALES = ("rowwise_scale_inv", "columnwise_scale_inv", "amax", "scale", "amax_history")
Placed = tuple[str, Tensor, int]  # name, tensor, number of its unit or bucket
Bytes = dict[str, int]


def zero(tensors: Sequence[Placed], ranks: int, stage: int, config: ZeroConfig) -> tuple[Bytes, list[Collective]]:
    """(bytes in memory by purpose, the collectives of a step) of one rank of a ZeroAdamW."""
    buckets = fill_buckets(tensors, config.bucket_size, ranks, config.grad_dtype)
    shard = flat_numel(buckets)
    weights = _quantized(tensor for _, tensor, _ in tensors)
    computed = _quantized(slot.parameter for bucket in buckets if not bucket.storage.scales for slot in bucket.slots)
    gathered_scales = sum(_flat(bucket, bucket.storage.scales) for bucket in buckets)
    reduced, own = _packed_amaxes(buckets, ranks)
    kept = sum(tensor.numel() * _arriving(tensor, config).itemsize for _, tensor, _ in tensors) if stage == 1 else 0
    copies = list(map(_copied, weights)) or [0]
    memory = {
        "weights": sum(_flat(bucket, bucket.storage.codes) for bucket in buckets),
        "columnwise copies": sum(copies) if config.keep_columnwise else max(copies),
        "scales": sum(map(_scales, computed)) + gathered_scales + reduced + own,
        "masters": shard * FP32,
        "moments": 2 * shard * config.moment_dtype.itemsize,
        "gradients": shard * FP32 + kept,
        "buckets": _in_flight(tensors, buckets, ranks, stage, config),
    }
    others, choices = ranks - 1, _choices(_quantized(tensor for _, tensor, _ in tensors))
    gradients = [(bucket.shard_numel, bucket.storage.grad_dtype) for bucket in buckets]
    gathers = sum(len(bucket.storage.gathered) for bucket in buckets)
    part = sum(_flat(bucket, bucket.storage.gathered) // ranks for bucket in buckets)
    return memory, [
        _of_gradients(gradients, ranks, config),
        _all_reduce("the norm", 1, FP64, ranks),
        _all_reduce("amaxes", 1, reduced, ranks),
        *([_all_reduce("choices of scales", 1, choices, ranks)] if choices else []),
        Collective("all-gather", "weights", gathers, part * others, ranks),
    ]


def _all_reduce(content: str, calls: int, nbytes: int, ranks: int, distance: int = 1) -> Collective:
    """All-reduces of `nbytes` bytes together, each of which a rank sends twice but for its part."""
    return Collective("all-reduce", content, calls if nbytes else 0, 2 * nbytes * (ranks - 1) // ranks, ranks, distance)


def _of_gradients(parts: Sequence[tuple[int, torch.dtype]], ranks: int, config: ZeroConfig) -> Collective:
    """How gradients reach their owners; `parts` are what one of them is sent: elements, and the
    dtype that is reduced.
    """
    if config.grad_wire:
        sent = sum(GradientMessage(numel).nbytes for numel, _ in parts) * (ranks - 1)
        return Collective("all-to-all", "gradients", len(parts), sent, ranks)
    sent = sum(numel * dtype.itemsize for numel, dtype in parts) * (ranks - 1)
    return Collective("reduce-scatter", "gradients", len(parts), sent, ranks)


def _flat(bucket: Bucket, buffers: Iterable[FlatBuffer]) -> int:
    """The bytes of these flat buffers of a bucket, padding included."""
    return sum(bucket.numel // elements * dtype.itemsize for _, dtype, elements in buffers)


def _arriving(tensor: Tensor, config: ZeroConfig) -> torch.dtype:
    """The dtype in which autograd brings a gradient."""
    widened = isinstance(tensor, QuantizedWeight) and config.grad_dtype is torch.float32
    return torch.float32 if widened else tensor.dtype


def _in_flight(tensors: Sequence[Placed], buckets: Sequence[Bucket], ranks: int, stage: int, config: ZeroConfig) -> int:
    """The most that gradients take in a backward pass, from their arrival until their bucket is in
    the FP32 shard; at stage 1 without the gradients themselves, which stay.
    """
    place = {slot.name: bucket for bucket in buckets for slot in bucket.slots}
    missing = {id(bucket): len(bucket.slots) for bucket in buckets}
    arrived = dict.fromkeys(missing, 0)
    waiting = flying = peak = 0
    for name, tensor, _ in reversed(tensors):
        bucket, dtype = place[name], _arriving(tensor, config)
        if stage == 2:
            arrived[id(bucket)] += tensor.numel() * dtype.itemsize
            waiting += tensor.numel() * dtype.itemsize
        peak = max(peak, waiting + flying)
        missing[id(bucket)] -= 1
        if missing[id(bucket)]:
            continue
        storage, gone = bucket.storage, arrived[id(bucket)]
        in_place = bucket.is_one_gradient and dtype is storage.grad_dtype
        packed = 0 if in_place else bucket.numel * storage.grad_dtype.itemsize
        peak = max(peak, waiting + packed)  # the bucket before has landed
        waiting -= gone
        flying = (packed or gone) + _result(bucket, ranks, config)
        peak = max(peak, waiting + flying)
        if config.grad_wire:
            flying -= packed or gone  # codes are made of them before they are sent
    return peak


def _result(bucket: Bucket, ranks: int, config: ZeroConfig) -> int:
    """The bytes of what a collective leaves, until they are in the FP32 shard; of messages also
    what it sends.
    """
    dtype = bucket.storage.grad_dtype
    if config.grad_wire:
        return min(ranks, 2) * ranks * GradientMessage(bucket.shard_numel).nbytes
    if ranks == 1:
        return 0
    if config.deterministic:
        return bucket.numel * dtype.itemsize
    return 0 if dtype is torch.float32 else bucket.shard_numel * dtype.itemsize


def fsdp(tensors: Sequence[Placed], shards: int, replicas: int, config: ZeroConfig) -> tuple[Bytes, list[Collective]]:
    """The same for FSDP2 and HSDP, for a rank with full shards."""
    every = [tensor for _, tensor, _ in tensors]
    owned = sum(_rows(tensor, shards) * (tensor.numel() // tensor.shape[0]) for tensor in every)
    grad = (config.grad_dtype or torch.bfloat16).itemsize
    units: dict[int, list[Tensor]] = {}
    for _, tensor, unit in tensors:
        units.setdefault(unit, []).append(tensor)
    weights = _quantized(every)
    sent = {unit: sum(_sent(tensor, shards) for tensor in held) for unit, held in units.items()}
    whole = _at_the_most({unit: shards * nbytes for unit, nbytes in sent.items()})
    scales = _at_the_most({unit: sum(map(_scales, _quantized(held))) for unit, held in units.items()})
    gradients = sorted(sum(tensor.numel() for tensor in held) for held in units.values())[-2:]
    reduced = [sum(_rows(t, shards) * (t.numel() // t.shape[0]) for t in held) for held in units.values()]
    packed = _cut_amaxes(weights, shards)
    codes = [sum(_codes(weight, shards) for weight in _quantized(held)) for held in units.values()]
    keep = shards == 1 or sum(codes) <= MOST_KEPT
    memory = {
        "weights": sum(_sent(w, shards) for w in weights) + (0 if keep else max(codes) - sum(codes)) + whole,
        "columnwise copies": max(map(_copied, weights), default=0),
        "scales": 4 * len(weights) + packed + scales,
        "masters": owned * FP32,
        "moments": 2 * owned * config.moment_dtype.itemsize,
        "gradients": owned * FP32,
        "buckets": sum(gradients) * grad,
    }
    others = shards - 1
    gathers = {unit: 1 if unit == ROOT else 2 for unit in units}
    part = sum(gathers[unit] * nbytes for unit, nbytes in sent.items())
    return memory, [
        _of_gradients([(numel, config.grad_dtype or torch.bfloat16) for numel in reduced], shards, config),
        _all_reduce("gradients", len(units), owned * grad if replicas > 1 else 0, replicas, shards),
        _all_reduce("the norm", 1, FP32, shards),
        _all_reduce("amaxes", 1, packed, shards),
        Collective("all-gather", "weights", sum(gathers.values()), part * others, shards),
    ]


def _at_the_most(by_unit: dict[int, int]) -> int:
    """The bytes of the root and of the two largest blocks."""
    blocks = sorted(nbytes for unit, nbytes in by_unit.items() if unit != ROOT)
    return by_unit.get(ROOT, 0) + sum(blocks[-2:])


def _rows(tensor: Tensor, shards: int) -> int:
    """The rows of the first dimension on a rank with a full share."""
    return -(-tensor.shape[0] // shards)


@functools.lru_cache(maxsize=1024)
def _geometry(weight: QuantizedWeight, shards: int) -> ShardGeometry:
    """The shard of the first rank, which no other exceeds."""
    rows, columns = weight.matrix_shape
    cut = RowShards(rows, _rows(weight, shards) * (rows // weight.shape[0]), shards)
    return ShardGeometry(weight.format, weight.dtype, cut, columns, 0)


@functools.lru_cache(maxsize=1024)
def _sent(tensor: Tensor, shards: int) -> int:
    """The bytes that each rank contributes to one all-gather."""
    if isinstance(tensor, QuantizedWeight):
        return GatherLayout(_geometry(tensor, shards)).nbytes
    return _rows(tensor, shards) * (tensor.numel() // tensor.shape[0]) * tensor.dtype.itemsize


@functools.lru_cache(maxsize=1024)
def _codes(weight: QuantizedWeight, shards: int) -> int:
    """The bytes of these that are codes."""
    return GatherLayout(_geometry(weight, shards)).codes_nbytes


def _cut_amaxes(weights: Sequence[QuantizedWeight], shards: int) -> int:
    """The bytes of the one all-reduce: tensor amaxes and those of block rows that shards cut, in
    bf16.
    """
    total = 0
    for geometry in (_geometry(weight, shards) for weight in weights):
        cut = sum(len(geometry.shards.cut(height)) * across for height, across, _ in geometry.grids())
        fmt = geometry.format
        if fmt.chooses_scales and fmt.block:
            cut += len(geometry.shards.cut(fmt.block[0])) * exchange_unit(fmt, geometry.columns)
        total += 2 * (cut + geometry.has_tensor_amax)
    return total


def _choices(weights: Sequence[QuantizedWeight]) -> int:
    """The bf16 bytes of the amaxes that are reduced again with the choices of their blocks."""
    return 2 * sum(sum(amax_counts(w.format, *w.matrix_shape)) for w in weights if w.format.chooses_scales)


def _quantized(tensors: Iterable[Tensor]) -> list[QuantizedWeight]:
    return [tensor for tensor in tensors if isinstance(tensor, QuantizedWeight)]


@functools.lru_cache(maxsize=1024)
def _scales(weight: QuantizedWeight) -> int:
    """The bytes of scale buffers, amax and delayed scaling, in flat buffers; without the scales of
    a columnwise copy.
    """
    found = buffers(weight.format, weight.matrix_shape, weight.dtype)
    transposed = weight.format.columnwise is Columnwise.TRANSPOSE
    names = [name for name in SCALES if not (name == "columnwise_scale_inv" and transposed)]
    return sum(_in_flat_buffer(found[name]) for name in names)


@functools.lru_cache(maxsize=1024)
def _copied(weight: QuantizedWeight) -> int:
    """The bytes of a columnwise copy, codes and scales; 0 if it is gathered or not needed."""
    fmt = weight.format.halves[-1]
    if fmt.columnwise is not Columnwise.TRANSPOSE:
        return 0
    found = buffers(fmt, weight.matrix_shape, weight.dtype)
    names = ["columnwise_data", "columnwise_scale_inv"] if fmt.block else ["columnwise_data"]
    return sum(_in_flat_buffer(found[name]) for name in names)


def all_amaxes(tensors: Iterable[Tensor], ranks: int) -> int:
    """The bf16 bytes of an all-reduce of all amaxes, of a host that gathers codes alone."""
    weights = _quantized(tensors)
    amaxes = sum(sum(amax_counts(weight.format, *weight.matrix_shape)) for weight in weights)
    return 2 * (amaxes + (2 if amaxes and ranks > 1 else 0)) + (_choices(weights) if ranks > 1 else 0)


def _packed_amaxes(buckets: Sequence[Bucket], ranks: int) -> tuple[int, int]:
    """(the bf16 bytes of the one all-reduce with two numbers that compare the ranks' calls, those
    of amaxes that only their rank has): where scales are gathered, only cut blocks are reduced.
    """
    reduced = own = 0
    for bucket in buckets:
        for slot in bucket.slots:
            matrix, cuts = slot.matrix_shape, bucket.cuts(slot)
            amaxes = sum(amax_counts(slot.format, *matrix))
            if cuts is None:
                reduced += amaxes + _cut_elements(bucket, slot)
            else:
                reduced += sum(rows.cuts.numel() * rows.across for rows in cut_rows(slot.format, matrix, cuts))
                own += -(-amaxes // ranks)
    return 2 * (reduced + (2 if reduced + own and ranks > 1 else 0)), 2 * own


def _cut_elements(bucket: Bucket, slot: Slot) -> int:
    """The elements of rows of blocks that shards cut, where blocks choose their scales by them."""
    if not slot.format.chooses_scales:
        return 0
    first = -(-slot.offset // bucket.shard_numel) * bucket.shard_numel - slot.offset
    unit = exchange_unit(slot.format, slot.matrix_shape[1])
    return sum(row.span.numel for row in cut_rows_of("", unit, range(first, slot.numel, bucket.shard_numel), 0))


def _in_flat_buffer(buffer: Buffer | None) -> int:
    return round_up(math.prod(buffer.shape), ALIGNMENT) * buffer.dtype.itemsize if buffer else 0
