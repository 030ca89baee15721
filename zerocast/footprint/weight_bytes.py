"""Bytes that are counted in the same way for every sharding: the bytes of weights and of
collectives.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerocast.distributed.bucket import BUCKET_SIZE
from zerocast.formats import Block, Columnwise, FormatSpec
from zerocast.formats.element import ITEMSIZE
from zerocast.formats.layout import (
    BUFFER_ALIGNMENT_ELEMENTS,
    Buffer,
    GradientMessage,
    Shape,
    buffers,
    matrix_shape,
    round_up,
    stored_matrices,
    upcast_operand,
    weight_amax_counts,
)

FP32, FP64 = 4, 8
SCALES = ("rowwise_scale_inv", "columnwise_scale_inv", "amax", "scale", "amax_history")
Bytes = dict[str, int]


# Without comparison, so that byte counts are cached by object.
@dataclass(frozen=True, eq=False)
class Planned:
    """A placeholder for a parameter in the functions that lay parameters out.

    Attributes:
        shape: its shape.
        format: its format; None for a plain parameter.
    """

    shape: Shape
    format: FormatSpec | None

    @property
    def dtype(self) -> str:
        """The name of the dtype of plain parameters, and the nominal dtype of weights."""
        return "bfloat16"

    @property
    def itemsize(self) -> int:
        """The bytes of an element of this dtype."""
        return ITEMSIZE[self.dtype]

    @property
    def matrix_shape(self) -> Block:
        """(rows, columns), with leading dimensions folded into the rows."""
        return matrix_shape(self.shape)

    def numel(self) -> int:
        """Return the number of elements of the weight."""
        return math.prod(self.shape)

    def weight_format(self) -> FormatSpec:
        """Return the format of a weight that is quantized."""
        assert self.format is not None
        return self.format

    def matrices(self) -> tuple[int, Block]:
        """Return the (number, shape) of the matrices in which a quantized weight is stored."""
        return stored_matrices(self.weight_format(), self.shape)


@dataclass(frozen=True)
class PlannedConfig:
    """The choices of ZeroConfig that bytes depend on, with dtypes keyed by name."""

    bucket_size: int = BUCKET_SIZE
    deterministic: bool = False
    grad_wire: str | None = None
    grad_dtype: str | None = None
    moment_dtype: str = "float32"
    keep_columnwise: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a bucket without elements."""
        if self.bucket_size < 1:
            raise ValueError(f"bucket_size must be positive, got {self.bucket_size}")

    @property
    def reduced_as(self) -> str:
        """The name of the dtype in which gradients are reduced."""
        return self.grad_dtype or "bfloat16"


# (name, parameter, number of its unit or bucket)
Placed = tuple[str, Planned, int]


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
    """Return `calls` all-reduces of `nbytes` bytes together.

    A rank sends each byte twice, except the bytes of its own part.
    """
    return Collective("all-reduce", content, calls if nbytes else 0, 2 * nbytes * (ranks - 1) // ranks, ranks)


def gradient_collective(parts: Sequence[tuple[int, str]], ranks: int, config: PlannedConfig) -> Collective:
    """Return the collective by which gradients reach their owners.

    `parts` has (elements, name of the reduced dtype) of each message to one owner.
    """
    if config.grad_wire:
        sent = sum(GradientMessage(numel).nbytes for numel, _ in parts) * (ranks - 1)
        return Collective("all-to-all", "gradients", len(parts), sent, ranks)
    sent = sum(numel * ITEMSIZE[dtype] for numel, dtype in parts) * (ranks - 1)
    return Collective("reduce-scatter", "gradients", len(parts), sent, ranks)


def quantized(parameters: Iterable[Planned]) -> list[Planned]:
    """Return the quantized weights among some parameters."""
    return [parameter for parameter in parameters if parameter.format is not None]


@functools.lru_cache(maxsize=1024)
def scale_bytes(weight: Planned) -> int:
    """Return the bytes of a weight's scales, amax and delayed scaling in flat buffers, without the
    scales of a columnwise copy.
    """
    fmt = weight.weight_format()
    layout = buffers(fmt, weight.shape, weight.dtype)
    transposed = fmt.columnwise is Columnwise.TRANSPOSE
    names = [name for name in SCALES if not (name == "columnwise_scale_inv" and transposed)]
    return sum(_in_flat_buffer(layout[name]) for name in names)


@functools.lru_cache(maxsize=1024)
def copy_bytes(weight: Planned) -> int:
    """Return the bytes of a columnwise copy, codes and scales; 0 if it is gathered or not
    needed.
    """
    fmt = weight.weight_format()
    if fmt.columnwise is not Columnwise.TRANSPOSE:
        return 0
    layout = buffers(fmt, weight.shape, weight.dtype)
    names = ["columnwise_data", "columnwise_scale_inv"] if fmt.block else ["columnwise_data"]
    return sum(_in_flat_buffer(layout[name]) for name in names)


@functools.lru_cache(maxsize=1024)
def operand_bytes(weight: Planned) -> int:
    """Return the bytes of the operand that a product reads in place of the rowwise codes: an
    operand in FP8 of formats that are exact there, else a columnwise copy.
    """
    fmt = weight.weight_format()
    if not fmt.is_exact_in_fp8:
        return copy_bytes(weight)
    return sum(buffer.nbytes for buffer in upcast_operand(fmt, *weight.matrix_shape))


def moment_bytes(numel: int, groups: int, config: PlannedConfig) -> int:
    """Return the bytes of AdamW's moments of `numel` elements, in `groups` groups if they are in 8
    bits.
    """
    if config.moment_dtype == "8bit":
        return 2 * (numel + groups * FP32)
    return 2 * numel * ITEMSIZE[config.moment_dtype]


def cut_groups(count: int, ranks: int, config: PlannedConfig) -> list[Collective]:
    """Return the all-reduce of the largest moments of groups that ranks share, if there are any."""
    is_reduced = count and ranks > 1 and config.moment_dtype == "8bit"
    return [all_reduce("cut groups of moments", 1, 2 * count * FP32, ranks)] if is_reduced else []


def amax_bytes(parameters: Iterable[Planned], ranks: int) -> int:
    """Return the bf16 bytes of an all-reduce of all amaxes, of a framework that gathers codes
    only.
    """
    weights = quantized(parameters)
    counts = [sum(weight_amax_counts(weight.weight_format(), weight.shape)) for weight in weights]
    # After its amaxes each weight has a flag that says whether its masters are finite. With several
    # ranks, two more numbers compare the ranks' calls.
    amaxes = sum(counts) + sum(count > 0 for count in counts)
    return 2 * (amaxes + (2 if amaxes and ranks > 1 else 0))


def _in_flat_buffer(buffer: Buffer | None) -> int:
    return round_up(math.prod(buffer.shape), BUFFER_ALIGNMENT_ELEMENTS) * buffer.itemsize if buffer else 0
