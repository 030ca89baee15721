"""Layouts of every format: shapes, spans, byte ranges and amax grids, in integer arithmetic.

A weight of more than two dimensions is treated as a matrix `[prod(leading), last]`, or as several
concatenated matrices where a block would span two of them (docs/formats/experts.md). The layouts
are specified in docs/formats/common.md. Every storage offset in the project comes from
`byte_range`, so ownership in elements and ownership in bytes cannot disagree.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from zerocast.formats import AmaxPolicy, Block, Columnwise, FormatSpec, ScaleRule
from zerocast.formats.element import ITEMSIZE, dtype_name, torch_dtype

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]

# cuBLASLt reads operands narrower than 16 bits, and their scales, from multiples of this.
OPERAND_ALIGNMENT_BYTES = 16
# Tensors that share one flat buffer begin at a cache line, for every dtype.
BUFFER_ALIGNMENT_ELEMENTS = 64
# Parameters and shards of optimizers begin at multiples of the largest block of a format.
SHARD_ALIGNMENT_ELEMENTS = 128
# cudaMalloc aligns to at least this, so views at multiples of it are as good as allocations.
ALLOCATION_ALIGNMENT_BYTES = 256


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def matrix_shape(shape: Sequence[int]) -> Block:
    """Return the (rows, columns) of a weight, with leading dimensions folded into the rows."""
    *leading, last = shape
    return math.prod(leading), last


def stored_matrices(fmt: FormatSpec, shape: Sequence[int]) -> tuple[int, Block]:
    """Return the (number, shape) of the matrices in which a weight is stored, concatenated in every
    buffer.

    That is one with leading dimensions folded into the rows. If a block would then span two
    matrices of the weight, it is these.
    """
    rows, columns = matrix_shape(shape)
    if len(shape) > 2:
        blocks = (fmt.exchange_block, fmt.columnwise_block)
        if any(block and shape[-2] % block[0] for block in blocks):
            return rows // shape[-2], (shape[-2], columns)
    return 1, (rows, columns)


def split_by_matrix(fmt: FormatSpec, shape: Sequence[int], span: "Span") -> "Iterator[tuple[int, Span, int]]":
    """Split a span at the matrices that a weight is stored in. Yields (number of the matrix,
    elements of the matrix, elements of the span before them), without empty parts.
    """
    count, matrix = stored_matrices(fmt, shape)
    size = math.prod(matrix)
    for number in range(count):
        own = span.intersect(Span(number * size, (number + 1) * size))
        if own.numel:
            yield number, Span(own.start - number * size, own.stop - number * size), own.start - span.start


def check_shape(fmt: FormatSpec, shape: Sequence[int]) -> None:
    """Raise ValueError unless a weight of this shape can be stored in `fmt`."""
    if not shape or math.prod(shape) == 0:
        raise ValueError(f"{fmt} needs weights with at least one element, got shape {tuple(shape)}")
    _, (rows, columns) = stored_matrices(fmt, shape)
    for name, extent, multiple in (("rows", rows, fmt.multiple[0]), ("columns", columns, fmt.multiple[1])):
        if extent % multiple:
            raise ValueError(
                f"{fmt} needs {name} that are a multiple of {multiple}, got {extent} in shape {tuple(shape)}"
            )


def fits(fmt: FormatSpec, shape: Sequence[int]) -> bool:
    """Return True if a weight of this shape can be stored in `fmt`."""
    try:
        check_shape(fmt, shape)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Span:
    """Elements `[start, stop)` of a row-major weight. A span may be empty."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of elements in the span."""
        return self.stop - self.start

    def intersect(self, other: "Span") -> "Span":
        """Return the span of the elements in both; an empty span at some position when they share
        none.
        """
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def boxes(self, shape: Sequence[int]) -> Iterator[tuple[Shape, Shape]]:
        """Split the span into boxes (offsets, sizes) of a tensor of `shape`, in order. A matrix has
        at most three: the end of a row, full rows, the start of a row.
        """
        yield from _boxes(self.start, self.stop, tuple(shape))


def _boxes(start: int, stop: int, shape: Shape) -> Iterator[tuple[Shape, Shape]]:
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    # `first` and `last` are rows of `inner` elements. The span starts inside row `first`, up to
    # `head_stop`, and ends inside row `last`; full rows may come between.
    inner = math.prod(shape[1:])
    first, last = start // inner, stop // inner
    head_stop = min(stop, round_up(start, inner))
    for offsets, sizes in _boxes(start - first * inner, head_stop - first * inner, shape[1:]):
        yield (first, *offsets), (1, *sizes)
    first_whole = round_up(start, inner) // inner
    if first_whole < last:
        yield (first_whole,) + (0,) * len(shape[1:]), (last - first_whole, *shape[1:])
    # If the head has reached `stop` already, the span is inside a single row and has no tail.
    if last * inner >= head_stop:
        for offsets, sizes in _boxes(0, stop - last * inner, shape[1:]):
            yield (last, *offsets), (1, *sizes)


def byte_range(fmt: FormatSpec, shape: Sequence[int], span: Span, dtype: "torch.dtype") -> tuple[int, int]:
    """Return the range `[first, last)` of bytes of the rowwise data that hold `span`; `dtype` is
    the nominal dtype.

    With 4-bit codes a span that ends inside a byte includes that byte. An empty span has no bytes.
    Raises ValueError for a span outside the weight.
    """
    if not 0 <= span.start <= span.stop <= math.prod(shape):
        raise ValueError(f"span [{span.start}, {span.stop}) is outside a weight of shape {tuple(shape)}")
    bits = fmt.bits or dtype.itemsize * 8
    first = span.start * bits // 8
    return first, -(-span.stop * bits // 8) if span.numel else first


def amax_grid(block: Block | None, rows: int, columns: int) -> Block:
    """Return the number of blocks, and so of amaxes, as (block_rows, block_columns); `block` None
    is the whole tensor.
    """
    if block is None:
        return 1, 1
    return -(-rows // block[0]), -(-columns // block[1])


def amax_counts(fmt: FormatSpec, rows: int, columns: int) -> tuple[int, int]:
    """Return the (rowwise, columnwise) numbers of packed amaxes of a matrix, without padding. The
    second is 0 unless the format casts columnwise codes in separate blocks.
    """
    if fmt.amax_policy is AmaxPolicy.NONE:
        return 0, 0
    rowwise = math.prod(amax_grid(fmt.block, rows, columns))
    if fmt.columnwise is not Columnwise.OWN_GRID:
        return rowwise, 0
    return rowwise, math.prod(amax_grid(fmt.columnwise_block, rows, columns))


def weight_amax_counts(fmt: FormatSpec, shape: Sequence[int]) -> tuple[int, int]:
    """Return the result of `amax_counts` for all matrices that a weight is stored in."""
    count, matrix = stored_matrices(fmt, shape)
    rowwise, columnwise = amax_counts(fmt, *matrix)
    return count * rowwise, count * columnwise


@dataclass(frozen=True)
class Buffer:
    """Shape and dtype (by its name) of one storage buffer of a weight, and the value in its
    padding.
    """

    shape: Shape
    dtype_name: str
    padding: float = 0.0

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype of the elements."""
        return torch_dtype(self.dtype_name)

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return ITEMSIZE[self.dtype_name]

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return math.prod(self.shape) * self.itemsize


def rowwise_data(fmt: FormatSpec, rows: int, columns: int, dtype: "torch.dtype | str") -> Buffer:
    """Return the rowwise data: u8 `[M, K]`, u8 `[M, K/2]` for 4-bit codes, nominal `[M, K]` for
    identity.
    """
    if fmt.element is None:
        return Buffer((rows, columns), dtype_name(dtype))
    return Buffer((rows, columns // fmt.elements_per_byte), "uint8")


def columnwise_data(fmt: FormatSpec, rows: int, columns: int) -> Buffer | None:
    """Return the columnwise data: u8 `[K, M]`, u8 `[K, M/2]` for 4-bit codes, u8 `[M, K]` for
    mxfp8.

    Returns None where the rowwise data serves both directions.
    """
    if fmt.columnwise in (Columnwise.NONE, Columnwise.SHARED):
        return None
    if fmt.columnwise is Columnwise.OWN_GRID:
        return Buffer((rows, columns), "uint8")
    return Buffer((columns, rows // fmt.elements_per_byte), "uint8")


def rowwise_scale_inv(fmt: FormatSpec, rows: int, columns: int) -> Buffer | None:
    """Return the scale buffer of the rowwise data with its padding, or None for formats without
    scales.

    A buffer row holds the scales of one block row; byte scales are repeated for each row of their
    blocks. BF16 scales have no padding.
    """
    if fmt.scale_rule is ScaleRule.NONE:
        return None
    if fmt.block is None:
        return Buffer((1,), "float32", 1.0)
    block_rows, block_columns = amax_grid(fmt.block, rows, columns)
    if fmt.scale_rule is ScaleRule.BF16:
        return Buffer((block_rows, block_columns), "bfloat16")
    # Padded as cuBLAS requires: 4 entries for FP32 scales, tiles of 128x4 for byte scales.
    if fmt.scale_rule is ScaleRule.FP32:
        return Buffer((block_rows, round_up(block_columns, 4)), "float32", 1.0)
    return Buffer((round_up(rows, 128), round_up(block_columns, 4)), "uint8")


def columnwise_scale_inv(fmt: FormatSpec, rows: int, columns: int) -> Buffer | None:
    """Return the scale buffer of the columnwise data, which equals the rowwise scale buffer of the
    transposed weight.

    mxfp8 instead has one row of scales per 32 rows of the weight, with one scale per column, padded
    to multiples of (4, 128).
    """
    if fmt.columnwise is Columnwise.NONE:
        return None
    if fmt.columnwise is Columnwise.TRANSPOSE:
        return rowwise_scale_inv(fmt, columns, rows)
    block_rows, block_columns = amax_grid(fmt.columnwise_block or fmt.block, rows, columns)
    return Buffer(
        (round_up(block_rows, 4), round_up(block_columns * fmt.scale_repeat(columnwise=True)[1], 128)), "uint8"
    )


def buffer_rows(fmt: FormatSpec, name: str, rows: int) -> int:
    """Return the number of rows of the buffer `name` that hold `rows` rows of a weight, without
    padding. These must be a multiple of a block. Not for transposed copies.
    """
    if name.endswith("data") or fmt.block is None:
        return rows
    columnwise = name.startswith("columnwise")
    height = (fmt.columnwise_block if columnwise else None) or fmt.block
    return -(-rows * fmt.scale_repeat(columnwise)[0] // height[0])


def upcast_operand(fmt: FormatSpec, rows: int, columns: int) -> tuple[Buffer, Buffer]:
    """Return the buffers of an upcast weight, or of its transpose: E4M3 codes `[rows, columns]` and
    one f32 scale per scale group, as in fp8_block, or one of the tensor, as in fp8_current.
    """
    if fmt.scale_group is None:
        return Buffer((rows, columns), "uint8"), Buffer((1,), "float32")
    block_rows, block_columns = amax_grid(fmt.scale_group, rows, columns)
    return Buffer((rows, columns), "uint8"), Buffer((block_rows, round_up(block_columns, 4)), "float32", 1.0)


def elements_per_scale(fmt: FormatSpec, shape: Sequence[int]) -> dict[str, int]:
    """Return the number of elements per entry of each scale buffer that a cast fills, by buffer
    name.

    With n elements per entry, a block row that ends at element e of the weight ends at entry e / n
    of the buffer. So the buffer can be sharded at the same boundaries as the codes. Empty if it
    cannot: a buffer is padded or repeats its scales, or a scale depends on the tensor amax.
    """
    _, matrix = stored_matrices(fmt, shape)
    by_name = {"rowwise_scale_inv": (fmt.block, rowwise_scale_inv(fmt, *matrix))}
    if fmt.columnwise is Columnwise.OWN_GRID:
        by_name["columnwise_scale_inv"] = fmt.columnwise_block, columnwise_scale_inv(fmt, *matrix)
    elements = {}
    for name, (block, buffer) in by_name.items():
        if block is None or buffer is None or fmt.has_tensor_amax:
            return {}
        # A block at an edge may have fewer elements, and a padded buffer has more entries than
        # blocks. The ratio would then differ between parts of the buffer.
        whole_blocks = all(extent % size == 0 for extent, size in zip(matrix, block, strict=True))
        if not whole_blocks or buffer.shape != amax_grid(block, *matrix):
            return {}
        elements[name] = math.prod(block)
    return elements


def whole_block_rows(fmt: FormatSpec, matrix: Block, span: Span) -> Span:
    """Return the part of a span that consists of full rows of exchange blocks. If there are none,
    an empty span at some position within it.
    """
    assert fmt.exchange_block
    rows, columns = matrix
    # The elements of a block row. The last one of a matrix may have fewer rows, so the end of the
    # matrix also ends a block row.
    unit = fmt.exchange_block[0] * columns
    start = round_up(span.start, unit)
    stop = span.stop if span.stop == rows * columns else span.stop // unit * unit
    return Span(start, stop) if start < stop else Span(span.stop, span.stop)


# The names of a weight's buffers. The order matters: products read the first four, and the fifth if
# scales have two levels.
BUFFERS = (
    "rowwise_data",
    "rowwise_scale_inv",
    "columnwise_data",
    "columnwise_scale_inv",
    "amax",
    "scale",
    "amax_history",
)


# A model repeats its shapes, and building a plan asks for the buffers of each weight several times.
@functools.lru_cache(maxsize=1024)
def buffers(fmt: FormatSpec, shape: Shape, dtype: "torch.dtype | str") -> Mapping[str, Buffer | None]:
    """Return every buffer of a weight, keyed by the names in `BUFFERS`; None for a buffer that the
    format lacks.
    """
    count, matrix = stored_matrices(fmt, shape)
    is_delayed = fmt.amax_policy is AmaxPolicy.DELAYED
    by_name = {
        "rowwise_data": rowwise_data(fmt, *matrix, dtype),
        "rowwise_scale_inv": rowwise_scale_inv(fmt, *matrix),
        "columnwise_data": columnwise_data(fmt, *matrix),
        "columnwise_scale_inv": columnwise_scale_inv(fmt, *matrix),
        "amax": Buffer((1,), "float32") if fmt.has_tensor_amax else None,
        "scale": Buffer((1,), "float32", 1.0) if is_delayed else None,
        "amax_history": Buffer((fmt.amax_history_len,), "float32") if is_delayed else None,
    }
    if count > 1:
        by_name = {name: _repeated(buffer, count) for name, buffer in by_name.items()}
    return MappingProxyType(by_name)


def _repeated(buffer: Buffer | None, count: int) -> Buffer | None:
    """Return a buffer of `count` concatenated matrices. Formats whose matrices may be stored
    separately have no value per tensor.
    """
    return None if buffer is None else replace(buffer, shape=(count * buffer.shape[0], *buffer.shape[1:]))


# Elements of a row that share the scales of their moments in 8 bits (docs/formats/moments_8bit.md).
MOMENT_GROUP = 128


def moment_group(element: int, columns: int) -> int:
    """Return the number of the group of an element, counted over the rows of its weight."""
    row, column = divmod(element, columns)
    return row * -(-columns // MOMENT_GROUP) + column // MOMENT_GROUP


def moment_groups(start: int, numel: int, columns: int) -> int:
    """Return the number of groups that have any of the `numel` elements, at least one, from `start`
    on.
    """
    return moment_group(start + numel - 1, columns) - moment_group(start, columns) + 1


def cut_moment_groups(boundaries: Iterable[int], columns: int) -> list[int]:
    """Return the numbers of the groups of a weight that boundaries, in its elements, divide."""
    return sorted({moment_group(cut, columns) for cut in boundaries if cut % columns % MOMENT_GROUP})


@dataclass(frozen=True)
class GradientMessage:
    """The layout of the bytes in which `numel` elements of a gradient are sent to one rank: E4M3
    codes, then one f32 `scale_inv` per group of `GROUP` elements, each part padded with zeros to a
    multiple of 16 bytes (docs/formats/fp8_1x128.md).
    """

    numel: int

    # Elements per scale. The last group may have fewer.
    GROUP: ClassVar[int] = 128

    @property
    def groups(self) -> int:
        """The number of scales, one per group of elements."""
        return -(-self.numel // self.GROUP)

    @property
    def scales_at(self) -> int:
        """The offset of the scales in bytes."""
        return round_up(self.numel, 16)

    @property
    def nbytes(self) -> int:
        """The size of the message in bytes."""
        return self.scales_at + round_up(4 * self.groups, 16)
