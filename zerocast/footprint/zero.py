"""The footprint of a ZeroAdamW: its own buckets, laid out over meta tensors.

Gradients of stage 2 are the FP32 shard and the buckets in flight: two of the largest size, the reduced part of one, and a started
bucket for every further kind of storage (../optim/README.md). Stage 1 keeps the gradients on the parameters besides.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerocast.footprint import buffers
from zerocast.optim import ZeroConfig
from zerocast.optim.bucket import Bucket, fill_buckets, flat_numel

FP32 = torch.float32.itemsize
Named = tuple[str, Tensor, int]


def footprint(
    tensors: Sequence[Named], ranks: int, stage: int, config: ZeroConfig
) -> tuple[dict[str, int], dict[str, int]]:
    """(bytes in memory, bytes that this rank sends in a step), by what they are."""
    buckets = fill_buckets(tensors, config.bucket_size, ranks, config.grad_dtype)
    shard = flat_numel(buckets)
    weights = buffers.quantized(tensor for _, tensor, _ in tensors)
    packed = buffers.packed_amaxes(weights, ranks)
    kept = sum(slot.numel * bucket.storage.grad_dtype.itemsize for bucket in buckets for slot in bucket.slots)
    memory = {
        "weights": sum(map(_gathered, buckets)),
        "columnwise copies": sum(map(buffers.transposed, weights)),
        "scales": sum(map(buffers.scales, weights)) + packed,
        "masters": shard * FP32,
        "moments": 2 * shard * config.moment_dtype.itemsize,
        "gradients": shard * FP32 + (kept if stage == 1 else 0),
        "buckets": _in_flight(buckets, ranks, config.deterministic),
    }
    others = ranks - 1
    wire = {
        "reduce-scatter": sum(bucket.shard_numel * bucket.storage.grad_dtype.itemsize for bucket in buckets) * others,
        "all-reduce": 2 * packed * others // ranks,
        "all-gather": sum(_gathered(bucket) // ranks for bucket in buckets) * others,
    }
    return memory, wire


def _gathered(bucket: Bucket) -> int:
    """Bytes of the flat buffers of a bucket, padding included."""
    storage = bucket.storage
    directions = 2 if storage.both_directions else 1
    return directions * bucket.numel // storage.elements_per_byte * storage.dtype.itemsize


def _in_flight(buckets: Sequence[Bucket], ranks: int, deterministic: bool) -> int:
    kinds = dict.fromkeys(bucket.storage for bucket in buckets)
    largest: dict[torch.dtype, int] = {}
    for bucket in buckets:
        dtype = bucket.storage.grad_dtype
        largest[dtype] = max(largest.get(dtype, 0), bucket.numel * dtype.itemsize)
    started = sum(largest[kind.grad_dtype] for kind in kinds)
    biggest = max(largest.values())
    second = biggest if len(buckets) > len(kinds) else 0  # one that is filled while another is on its way
    results = 0 if ranks == 1 else biggest if deterministic else biggest // ranks
    return started + second + results
