"""The footprint of FSDP2 and HSDP: every parameter cut along its first dimension, as torch's `fully_shard` cuts it.

Every block is a unit that is resharded after its forward pass and gathered again for its backward pass; what lies outside of
blocks is the root, gathered once. The FP32 shard is the parameter; beside it lie the quantized bytes of the shard with the scales
of its blocks, which are what is gathered. At the most the root and two blocks are whole, the one at work and the next, with
columnwise copies, and the gradients of two units. What travels follows the design of `zerocast.fsdp2` and has not been held against
a run.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerocast.footprint import buffers
from zerocast.footprint.shapes import ROOT
from zerocast.formats import Columnwise, FormatSpec, ScaleRule
from zerocast.formats.layout import Span, amax_grid, byte_range, round_up
from zerocast.optim import ZeroConfig
from zerocast.weight import QuantizedWeight

FP32 = torch.float32.itemsize
Placed = tuple[str, Tensor, int]  # name, tensor, unit


def footprint(
    tensors: Sequence[Placed], shards: int, replicas: int, config: ZeroConfig
) -> tuple[dict[str, int], dict[str, int]]:
    """(bytes in memory, bytes that this rank sends in a step), by what they are, of a rank with full shards."""
    every = [tensor for _, tensor, _ in tensors]
    owned = sum(_rows(tensor, shards) * (tensor.numel() // tensor.shape[0]) for tensor in every)
    grad = (config.grad_dtype or torch.bfloat16).itemsize
    units: dict[int, list[Tensor]] = {}
    for _, tensor, unit in tensors:
        units.setdefault(unit, []).append(tensor)
    weights = buffers.quantized(every)
    sent = {unit: sum(_sent(tensor, shards) for tensor in held) for unit, held in units.items()}
    whole = _at_the_most({unit: shards * nbytes for unit, nbytes in sent.items()})
    copies = _at_the_most({unit: sum(map(_made, buffers.quantized(held))) for unit, held in units.items()})
    gradients = sorted(sum(tensor.numel() for tensor in held) for held in units.values())[-2:]
    packed = _cut_amaxes(weights, shards)
    memory = {
        "weights": sum(_sent(tensor, shards) for tensor in weights) + whole,
        "columnwise copies": copies,
        "scales": 4 * len(weights) + packed,
        "masters": owned * FP32,
        "moments": 2 * owned * config.moment_dtype.itemsize,
        "gradients": owned * FP32,
        "buckets": sum(gradients) * grad,
    }
    other = shards - 1
    wire = {
        "reduce-scatter": owned * grad * other,
        "all-reduce": 2 * packed * other // shards + 2 * owned * grad * (replicas - 1) // replicas,
        "all-gather": sum(nbytes * (1 if unit == ROOT else 2) for unit, nbytes in sent.items()) * other,
    }
    return memory, wire


def _at_the_most(by_unit: dict[int, int]) -> int:
    """Of the root and two blocks."""
    blocks = sorted(nbytes for unit, nbytes in by_unit.items() if unit != ROOT)
    return by_unit.get(ROOT, 0) + sum(blocks[-2:])


def _rows(tensor: Tensor, shards: int) -> int:
    """Of the first dimension, on a rank that has its full share."""
    return -(-tensor.shape[0] // shards)


def _sent(tensor: Tensor, shards: int) -> int:
    """Bytes that a rank gives to one all-gather, the same on all: those of the shard, with the scales of its blocks."""
    rows = _rows(tensor, shards)
    numel = rows * (tensor.numel() // tensor.shape[0])
    if not isinstance(tensor, QuantizedWeight):
        return numel * tensor.dtype.itemsize
    fmt, columns = tensor.format, tensor.matrix_shape[1]
    first, last = byte_range(fmt, (numel // columns, columns), Span(0, numel), tensor.dtype)
    both = 2 if fmt.columnwise is Columnwise.OWN_GRID else 1
    return round_up(both * (last - first) + _scales(fmt, numel // columns, columns), 16)


def _scales(fmt: FormatSpec, rows: int, columns: int) -> int:
    """One scale a block; a scale a tensor follows from the reduced amax and is not sent."""
    if fmt.block is None:
        return 0
    size = 4 if fmt.scale_rule is ScaleRule.FP32 else 1
    grids = [fmt.block, fmt.columnwise_block] if fmt.columnwise_block else [fmt.block]
    return size * sum(down * across for down, across in (amax_grid(block, rows, columns) for block in grids))


def _made(weight: QuantizedWeight) -> int:
    """What is made after the all-gather: whole scale buffers, and transposed codes."""
    return buffers.scales(weight) + buffers.transposed(weight)


def _cut_amaxes(weights: Sequence[QuantizedWeight], shards: int) -> int:
    """Of the one all-reduce: a tensor amax, and the amaxes of the block rows that boundaries cut, in bf16."""
    total = 0
    for weight in weights:
        rows, columns = weight.matrix_shape
        cut_rows = 0
        for block in (weight.format.block, weight.format.columnwise_block):
            cuts = range(_rows(weight, shards), rows, _rows(weight, shards))
            if block:
                cut_rows += sum(bool(cut % block[0]) for cut in cuts) * amax_grid(block, rows, columns)[1]
        total += 2 * (cut_rows + weight.format.has_tensor_amax)
    return total
