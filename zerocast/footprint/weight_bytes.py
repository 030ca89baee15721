"""Bytes that are counted alike for every sharding: those of weights, and those of collectives."""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.formats import Columnwise
from zerocast.formats.layout import (
    BUFFER_ALIGNMENT_ELEMENTS,
    Buffer,
    GradientMessage,
    buffers,
    round_up,
    upcast_operand,
    weight_amax_counts,
)
from zerocast.optim import ZeroConfig
from zerocast.weight import QuantizedWeight

FP32, FP64 = torch.float32.itemsize, torch.float64.itemsize
SCALES = ("rowwise_scale_inv", "columnwise_scale_inv", "amax", "scale", "amax_history")
# (name, tensor, number of its unit or bucket)
Placed = tuple[str, Tensor, int]
Bytes = dict[str, int]


@dataclass(frozen=True)
class Collective:
    """The calls of one kind of collective in a step.

    Attributes:
        kind: reduce-scatter, all-to-all, all-gather or all-reduce.
        content: the tensors that are sent, in words.
        calls: the number of calls.
        sent: the bytes that a rank sends in all calls together.
        ranks: the number of ranks that take part.
    """

    kind: str
    content: str
    calls: int
    sent: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.content}"


def all_reduce(content: str, calls: int, nbytes: int, ranks: int) -> Collective:
    """`calls` all-reduces of `nbytes` bytes together.

    A rank sends each byte twice, except those of its own part.
    """
    return Collective("all-reduce", content, calls if nbytes else 0, 2 * nbytes * (ranks - 1) // ranks, ranks)


def gradient_collective(parts: Sequence[tuple[int, torch.dtype]], ranks: int, config: ZeroConfig) -> Collective:
    """The collective by which gradients reach their owners.

    `parts` has (elements, reduced dtype) of each message to one owner.
    """
    if config.grad_wire:
        sent = sum(GradientMessage(numel).nbytes for numel, _ in parts) * (ranks - 1)
        return Collective("all-to-all", "gradients", len(parts), sent, ranks)
    sent = sum(numel * dtype.itemsize for numel, dtype in parts) * (ranks - 1)
    return Collective("reduce-scatter", "gradients", len(parts), sent, ranks)


def quantized(tensors: Iterable[Tensor]) -> list[QuantizedWeight]:
    """The quantized weights among some tensors."""
    return [tensor for tensor in tensors if isinstance(tensor, QuantizedWeight)]


@functools.lru_cache(maxsize=1024)
def scale_bytes(weight: QuantizedWeight) -> int:
    """The bytes of a weight's scales, amax and delayed scaling in flat buffers, without the scales
    of a columnwise copy.
    """
    layout = buffers(weight.format, weight.shape, weight.dtype)
    transposed = weight.format.columnwise is Columnwise.TRANSPOSE
    names = [name for name in SCALES if not (name == "columnwise_scale_inv" and transposed)]
    return sum(_in_flat_buffer(layout[name]) for name in names)


@functools.lru_cache(maxsize=1024)
def copy_bytes(weight: QuantizedWeight) -> int:
    """The bytes of a columnwise copy, codes and scales; 0 if it is gathered or not needed."""
    fmt = weight.format
    if fmt.columnwise is not Columnwise.TRANSPOSE:
        return 0
    layout = buffers(fmt, weight.shape, weight.dtype)
    names = ["columnwise_data", "columnwise_scale_inv"] if fmt.block else ["columnwise_data"]
    return sum(_in_flat_buffer(layout[name]) for name in names)


@functools.lru_cache(maxsize=1024)
def operand_bytes(weight: QuantizedWeight) -> int:
    """The bytes of what a product reads in place of the rowwise codes: an operand in FP8 of formats
    that are exact there, else a columnwise copy.
    """
    if not weight.format.is_exact_in_fp8:
        return copy_bytes(weight)
    return sum(
        math.prod(buffer.shape) * buffer.dtype.itemsize
        for buffer in upcast_operand(weight.format, *weight.matrix_shape)
    )


def moment_bytes(numel: int, groups: int, config: ZeroConfig) -> int:
    """The bytes of AdamW's moments of so many elements, in so many groups if they are in 8 bits."""
    if isinstance(config.moment_dtype, torch.dtype):
        return 2 * numel * config.moment_dtype.itemsize
    return 2 * (numel + groups * FP32)


def cut_groups(count: int, ranks: int, config: ZeroConfig) -> list[Collective]:
    """The all-reduce of the largest moments of groups that ranks cut, if there is any."""
    is_reduced = count and ranks > 1 and config.moment_dtype == "8bit"
    return [all_reduce("cut groups of moments", 1, 2 * count * FP32, ranks)] if is_reduced else []


def amax_bytes(tensors: Iterable[Tensor], ranks: int) -> int:
    """The bf16 bytes of an all-reduce of all amaxes, of a host that gathers codes alone."""
    weights = quantized(tensors)
    counts = [sum(weight_amax_counts(weight.format, weight.shape)) for weight in weights]
    # After its amaxes each weight has a flag that says whether its masters are finite. With several
    # ranks, two more numbers compare the ranks' calls.
    amaxes = sum(counts) + sum(count > 0 for count in counts)
    return 2 * (amaxes + (2 if amaxes and ranks > 1 else 0))


def _in_flat_buffer(buffer: Buffer | None) -> int:
    return round_up(math.prod(buffer.shape), BUFFER_ALIGNMENT_ELEMENTS) * buffer.dtype.itemsize if buffer else 0
