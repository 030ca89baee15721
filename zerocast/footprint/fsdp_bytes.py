"""The bytes of one rank under FSDP2 and HSDP, for a rank with a full share.

Every parameter is sharded along its first dimension, as torch's `fully_shard` does. Every block is
a unit that is resharded after its forward pass and gathered again for its backward pass. Parameters
outside of blocks form the root, which is gathered once. A rank has the FP32 shard, which is the
parameter, the scales of its blocks, and the codes of the unit that is being gathered. It has all
codes if they are small, or if the shard group has one rank. At the peak the root and two blocks are
unsharded, the one that computes and the next one, with the columnwise copies or FP8 operands of one
unit and the gradients of two. Traffic is counted for a step with one micro-batch and with torch's
norm of gradients.
"""

import functools
from collections.abc import Sequence

from zerocast.distributed.row_shards import MAX_KEPT_BYTES, RowShards, ShardGeometry, weight_layout
from zerocast.footprint.model_files import ROOT
from zerocast.footprint.weight_bytes import (
    FP32,
    Bytes,
    Collective,
    Placed,
    Planned,
    PlannedConfig,
    all_reduce,
    cut_groups,
    gradient_collective,
    moment_bytes,
    operand_bytes,
    quantized,
    scale_bytes,
)
from zerocast.formats.element import ITEMSIZE
from zerocast.formats.layout import cut_moment_groups, moment_groups


def fsdp(
    tensors: Sequence[Placed], shards: int, replicas: int, config: PlannedConfig
) -> tuple[Bytes, list[Collective]]:
    """Return the bytes in memory by purpose, and the collectives of a step, of a rank with full
    shards.
    """
    all_tensors = [tensor for _, tensor, _ in tensors]
    shares = [(_rows(tensor, shards) * (tensor.numel() // tensor.shape[0]), tensor.shape[-1]) for tensor in all_tensors]
    owned = sum(numel for numel, _ in shares)
    groups = sum(moment_groups(0, numel, columns) for numel, columns in shares)
    grad_bytes = ITEMSIZE[config.reduced_as]
    units: dict[int, list[Planned]] = {}
    for _, tensor, unit in tensors:
        units.setdefault(unit, []).append(tensor)
    weights = quantized(all_tensors)
    # By unit: the bytes that this rank sends, and the elements of its shard of the gradients.
    sent = {unit: sum(_sent(tensor, shards) for tensor in members) for unit, members in units.items()}
    reduced = [sum(_rows(t, shards) * (t.numel() // t.shape[0]) for t in members) for members in units.values()]
    unsharded = _at_the_peak({unit: shards * nbytes for unit, nbytes in sent.items()})
    scales = _at_the_peak({unit: sum(map(scale_bytes, quantized(members))) for unit, members in units.items()})
    gradients = sorted(sum(tensor.numel() for tensor in members) for members in units.values())[-2:]
    packed = _cut_amaxes(weights, shards)
    codes = [sum(_codes(weight, shards) for weight in quantized(members)) for members in units.values()]
    # If not all codes are in memory, the codes of the largest unit are while it is gathered.
    keeps_codes = shards == 1 or sum(codes) <= MAX_KEPT_BYTES
    not_kept = 0 if keeps_codes else sum(codes) - max(codes)
    memory = {
        "weights": sum(_sent(weight, shards) for weight in weights) - not_kept + unsharded,
        "columnwise copies": max(sum(map(operand_bytes, quantized(members))) for members in units.values()),
        "scales": 4 * len(weights) + packed + scales,
        "masters": owned * FP32,
        "moments": moment_bytes(owned, groups, config),
        "gradients": owned * FP32,
        "buckets": sum(gradients) * grad_bytes,
    }
    others = shards - 1
    gathers = {unit: 1 if unit == ROOT else 2 for unit in units}
    sent_in_step = sum(gathers[unit] * nbytes for unit, nbytes in sent.items())
    return memory, [
        gradient_collective([(numel, config.reduced_as) for numel in reduced], shards, config),
        all_reduce("gradients", len(units), owned * grad_bytes if replicas > 1 else 0, replicas),
        all_reduce("the norm", 1, FP32, shards),
        all_reduce("amaxes", 1, packed, shards),
        # A flag for each weight, and two numbers, in bf16.
        all_reduce("reports of replicas", 1, 2 * (len(weights) + 2) if replicas > 1 and weights else 0, replicas),
        *cut_groups(sum(_cut_groups(tensor, shards) for tensor in all_tensors), shards, config),
        Collective("all-gather", "weights", sum(gathers.values()), sent_in_step * others, shards),
    ]


def _at_the_peak(by_unit: dict[int, int]) -> int:
    """Return the bytes of the root and of the two largest blocks, which are unsharded together."""
    blocks = sorted(nbytes for unit, nbytes in by_unit.items() if unit != ROOT)
    return by_unit.get(ROOT, 0) + sum(blocks[-2:])


def _rows(tensor: Planned, shards: int) -> int:
    """Return the rows of the first dimension on a rank with a full share."""
    return -(-tensor.shape[0] // shards)


def _cut_groups(tensor: Planned, shards: int) -> int:
    """Return the number of groups of a vector's moments that straddle a shard boundary. Groups of
    other tensors are within a row.
    """
    if len(tensor.shape) > 1:
        return 0
    numel = tensor.numel()
    return len(cut_moment_groups(range(_rows(tensor, shards), numel, _rows(tensor, shards)), numel))


@functools.lru_cache(maxsize=1024)
def _geometry(weight: Planned, shards: int) -> ShardGeometry:
    """Return the shard of the first rank, which no other exceeds."""
    rows, columns = weight.matrix_shape
    cut = RowShards(rows, _rows(weight, shards) * (rows // weight.shape[0]), shards)
    count, (matrix_rows, _) = weight.matrices()
    return ShardGeometry(weight.weight_format(), weight.dtype, cut, columns, 0, matrix_rows if count > 1 else None)


@functools.lru_cache(maxsize=1024)
def _sent(tensor: Planned, shards: int) -> int:
    """Return the bytes that each rank contributes to one all-gather."""
    if tensor.format is not None:
        return weight_layout(_geometry(tensor, shards)).nbytes
    return _rows(tensor, shards) * (tensor.numel() // tensor.shape[0]) * tensor.itemsize


@functools.lru_cache(maxsize=1024)
def _codes(weight: Planned, shards: int) -> int:
    """Return the bytes of codes among those that a rank contributes to one all-gather."""
    return weight_layout(_geometry(weight, shards)).codes_nbytes


def _cut_amaxes(weights: Sequence[Planned], shards: int) -> int:
    """Return the bytes of the one all-reduce: tensor amaxes and the amaxes of block rows that
    straddle a shard boundary, in bf16.
    """
    total = 0
    for geometry in (_geometry(weight, shards) for weight in weights):
        cut = sum(len(geometry.scale_shards.cut(grid.height)) * grid.row_numel for grid in geometry.amax_grids())
        total += 2 * (cut + geometry.has_tensor_amax)
    return total
