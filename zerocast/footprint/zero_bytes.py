"""The bytes of one rank of a ZeroAdamW or ZeroMuon: its own buckets, laid out over meta tensors.

The gradients of stage 2 are the FP32 shard and the buckets in flight, for a backward pass that
completes parameters in reverse order of registration (../optim/README.md). Stage 1 also keeps all
gradients of this rank. Columnwise copies are those of all weights where they are kept, else the
largest one, for the product that reads it. Traffic is that of a step with one micro-batch and with
the norm of gradients. Muon has one moment, FP32, and its parameters lie in buckets of their own,
padded so that ranks own them in whole; their gradients are cut evenly, and sent to the owners in
the step, by the rank that sends most of them as many bytes as are counted. What a step takes for
that, and beside a matrix while it is updated, is left out: activations are gone then.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from zerocast.cast.amaxes import cut_rows
from zerocast.footprint.collective import Collective
from zerocast.footprint.weight_bytes import (
    FP32,
    FP64,
    Bytes,
    Placed,
    all_reduce,
    copy_bytes,
    gradient_collective,
    quantized,
    scale_bytes,
)
from zerocast.formats.layout import GradientMessage, amax_counts
from zerocast.optim import ZeroConfig
from zerocast.optim.bucket import Bucket, FlatBuffer, Layout, flat_numel, lay_out
from zerocast.optim.gradient_exchange import most_sent, rounds
from zerocast.optim.gradients import IN_FLIGHT
from zerocast.weight import QuantizedWeight


def zero(
    tensors: Sequence[Placed], ranks: int, stage: int, config: ZeroConfig, costs: Mapping[str, int]
) -> tuple[Bytes, list[Collective], float]:
    """(bytes in memory by purpose, the collectives of a step, the operations of Muon on the rank
    that has most in those of the mean) of one rank of a ZeroAdamW, or of a ZeroMuon: `costs` are
    the operations of Muon's parameters by name.
    """
    layout = lay_out(tensors, config.bucket_size, ranks, config.grad_dtype, costs)
    buckets = layout.buckets
    shard, cut = flat_numel(buckets), flat_numel([bucket for bucket in buckets if not bucket.storage.whole])
    weights = quantized(tensor for _, tensor, _ in tensors)
    computed = quantized(slot.parameter for bucket in buckets if not bucket.storage.scales for slot in bucket.slots)
    gathered_scales = sum(_flat(bucket, bucket.storage.scales) for bucket in buckets)
    reduced, own = _packed_amaxes(buckets, ranks)
    # Stage 1 keeps all gradients of this rank until the step.
    all_gradients = sum(tensor.numel() * _arriving(tensor, config).itemsize for _, tensor, _ in tensors)
    kept_gradients = all_gradients if stage == 1 else 0
    copies = list(map(copy_bytes, weights)) or [0]
    memory = {
        "weights": sum(_flat(bucket, bucket.storage.codes) for bucket in buckets),
        "columnwise copies": sum(copies) if config.keep_columnwise else max(copies),
        "scales": sum(map(scale_bytes, computed)) + gathered_scales + reduced + own,
        "masters": shard * FP32,
        "moments": 2 * cut * config.moment_dtype.itemsize + (shard - cut) * FP32,
        "gradients": flat_numel(layout.gradients) * FP32 + kept_gradients,
        "buckets": _in_flight(tensors, layout.gradients, ranks, stage, config),
    }
    others = ranks - 1
    gradients = [(bucket.shard_numel, bucket.storage.grad_dtype) for bucket in layout.gradients]
    gathers = sum(len(bucket.storage.gathered) for bucket in buckets)
    own_bytes = sum(_flat(bucket, bucket.storage.gathered) // ranks for bucket in buckets)
    collectives = [
        gradient_collective(gradients, ranks, config),
        all_reduce("the norm", 1, FP64, ranks),
        *([_exchange(layout, ranks, config)] if costs else []),
        all_reduce("amaxes", 1, reduced, ranks),
        Collective("all-gather", "weights", gathers, own_bytes * others, ranks),
    ]
    return memory, collectives, _busiest(buckets, ranks, costs) if costs else 0.0


def _exchange(layout: Layout, ranks: int, config: ZeroConfig) -> Collective:
    """The all-to-all by which reduced gradients reach the owners of matrices."""
    calls = len(rounds(layout, ranks, config.bucket_size)) if ranks > 1 else 0
    return Collective("all-to-all", "gradients for owners", calls, most_sent(layout, ranks) * FP32, ranks)


def _busiest(buckets: Sequence[Bucket], ranks: int, costs: Mapping[str, int]) -> float:
    work: Counter[int] = Counter()
    for bucket in buckets:
        if bucket.storage.whole:
            for slot in bucket.slots:
                work[slot.offset // bucket.shard_numel] += costs[slot.name]
    return max(work.values()) * ranks / work.total()


def _flat(bucket: Bucket, buffers: Iterable[FlatBuffer]) -> int:
    """The bytes of these flat buffers of a bucket, padding included."""
    return sum(bucket.numel // elements * dtype.itemsize for _, dtype, elements in buffers)


def _arriving(tensor: Tensor, config: ZeroConfig) -> torch.dtype:
    """The dtype of a gradient as autograd produces it."""
    widened = isinstance(tensor, QuantizedWeight) and config.grad_dtype is torch.float32
    return torch.float32 if widened else tensor.dtype


def _in_flight(tensors: Sequence[Placed], buckets: Sequence[Bucket], ranks: int, stage: int, config: ZeroConfig) -> int:
    """The most that gradients take in a backward pass, from their arrival until their bucket is in
    the FP32 shard; at stage 1 without the gradients themselves, which stay.
    """
    place = {slot.name: bucket for bucket in buckets for slot in bucket.slots}
    missing = {id(bucket): len(bucket.slots) for bucket in buckets}
    arrived = dict.fromkeys(missing, 0)
    flying: deque[tuple[int, int]] = deque()  # (elements, bytes) of the buckets on their way
    most = IN_FLIGHT * config.bucket_size if ranks > 1 else 0
    waiting = peak = 0
    for name, tensor, _ in reversed(tensors):
        bucket, dtype = place[name], _arriving(tensor, config)
        if stage == 2:
            arrived[id(bucket)] += tensor.numel() * dtype.itemsize
            waiting += tensor.numel() * dtype.itemsize
        peak = max(peak, waiting + _bytes(flying))
        missing[id(bucket)] -= 1
        if missing[id(bucket)]:
            continue
        storage, gone = bucket.storage, arrived[id(bucket)]
        in_place = bucket.is_one_gradient and dtype is storage.grad_dtype
        packed = 0 if in_place else bucket.numel * storage.grad_dtype.itemsize
        while flying and bucket.numel + sum(numel for numel, _ in flying) > most:
            flying.popleft()
        peak = max(peak, waiting + packed + _bytes(flying))
        waiting -= gone
        result = _result(bucket, ranks, config)
        peak = max(peak, waiting + (packed or gone) + result + _bytes(flying))
        # Gradients are quantized before they are sent, and freed then.
        flying.append((bucket.numel, result if config.grad_wire else (packed or gone) + result))
    return peak


def _bytes(flying: Iterable[tuple[int, int]]) -> int:
    return sum(nbytes for _, nbytes in flying)


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


def _packed_amaxes(buckets: Sequence[Bucket], ranks: int) -> tuple[int, int]:
    """(the bf16 bytes of the one all-reduce, those of amaxes that only their rank has): where
    scales are gathered, only cut blocks are reduced.

    With the amaxes travel a flag a parameter, whether its masters are finite, and two numbers that
    compare the ranks' calls.
    """
    reduced = own = 0
    for bucket in buckets:
        for slot in bucket.slots:
            matrix, cuts = slot.matrix_shape, bucket.cuts(slot)
            amaxes = sum(amax_counts(slot.format, *matrix))
            reduced += 1
            if cuts is None:
                reduced += amaxes
            else:
                reduced += sum(rows.cuts.numel() * rows.across for rows in cut_rows(slot.format, matrix, cuts))
                own += -(-amaxes // ranks)
    return 2 * (reduced + (2 if reduced + own and ranks > 1 else 0)), 2 * own
