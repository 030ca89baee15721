"""The descriptor table: everything a stage needs to know about each weight, one int64 row per
weight.

A stage gets base tensors (full storages, viewed as one-dimensional tensors of the role's dtype) and
this table. The number of launches then does not depend on the number of weights, and no op gets a
bare address. `csrc/descriptor.h` has the same columns; an extension whose columns differ raises
ImportError.
"""

import enum
import functools
import math
from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

from zerocast.formats import Columnwise, FormatSpec
from zerocast.formats.layout import Span, buffers, byte_range


class Column(enum.IntEnum):
    """Columns of a descriptor row; -1 marks an absent buffer.

    Offsets count elements of the base's dtype, except data offsets, which count bytes.
    """

    ROWS = 0  # the rows of the weight as a matrix
    COLUMNS = 1
    START = 2  # first owned element, row-major
    NUMEL = 3  # owned elements; 0 when this rank owns nothing
    MASTER_BASE = 4  # index into the list of masters
    MASTER_OFFSET = 5  # the offset of element START
    ROW_AMAX = 6  # the offset of the first rowwise amax in the packed buffer; the grid is not padded
    COLUMN_AMAX = 7  # the offset of the first amax of a separate columnwise grid
    SHARED_AMAX = 7  # two-level scales, without such a grid: the offset of a tensor amax that is reduced by itself
    ROW_DATA_BASE = 8
    ROW_DATA_OFFSET = 9  # the offset of element 0 of the weight; negative if only a later shard is stored
    COLUMN_DATA_BASE = 10
    COLUMN_DATA_OFFSET = 11
    ROW_SCALE_BASE = 12
    ROW_SCALE_OFFSET = 13
    COLUMN_SCALE_BASE = 14
    COLUMN_SCALE_OFFSET = 15
    AMAX_BASE = 16  # the weight's f32[1] amax
    AMAX_OFFSET = 17
    SCALE_BASE = 18  # delayed scaling: f32[1] scale
    SCALE_OFFSET = 19
    HISTORY_BASE = 20  # delayed scaling: f32[amax_history_len]
    HISTORY_OFFSET = 21
    NOT_FINITE = 22  # the offset of the number in the packed buffer that becomes 1 if an owned master is NaN or Inf


class Piece(enum.IntEnum):
    """Columns of a row that describes this rank's elements of a weight to the stages of Adam with
    moments in 8 bits.
    """

    BASE = 0  # index into the lists of masters, gradients, moments and scales
    OFFSET = 1  # the offset of the first element in the flat tensors
    NUMEL = 2  # the number of elements, more than 0
    SCALARS = 3  # row of Adam's scalars
    START = 4  # the first element's index in the full weight, row-major
    COLUMNS = 5  # the columns of the weight; each of its rows begins a new group of 128
    SCALE = 6  # index of the first group's scale of the first moment
    SECOND_SCALE = 7  # index of the first group's scale of the second moment
    CUT_FIRST = 8  # index in `cut_largest` of the first group; -1 if this rank has all of that group
    CUT_LAST = 9  # index in `cut_largest` of the last group, which may be the first one; -1 likewise
    KEY = 10  # the key of the weight's random numbers, less than 2**32


WIDTH = len(Column)

# (base, offset) of each buffer of a weight.
BUFFER_COLUMNS = {
    "rowwise_data": (Column.ROW_DATA_BASE, Column.ROW_DATA_OFFSET),
    "rowwise_scale_inv": (Column.ROW_SCALE_BASE, Column.ROW_SCALE_OFFSET),
    "columnwise_data": (Column.COLUMN_DATA_BASE, Column.COLUMN_DATA_OFFSET),
    "columnwise_scale_inv": (Column.COLUMN_SCALE_BASE, Column.COLUMN_SCALE_OFFSET),
    "amax": (Column.AMAX_BASE, Column.AMAX_OFFSET),
    "scale": (Column.SCALE_BASE, Column.SCALE_OFFSET),
    "amax_history": (Column.HISTORY_BASE, Column.HISTORY_OFFSET),
}


def check_rows(
    fmt: FormatSpec,
    nominal: torch.dtype,
    rows: Sequence[Sequence[int]],
    masters: Mapping[str, Sequence[Tensor]],
    bases: Mapping[str, Sequence[Tensor]],
    of_whole_weights: bool = False,
    needed: Container[str] = (),
) -> None:
    """Raise ValueError unless every element that stages reach by these rows is inside of its base.

    Stages check nothing themselves, since on a device the host would have to wait for the table.

    `masters` has the bases of the masters and of the lists parallel to them, by argument name, and
    `bases` the bases of buffers, keyed by buffer name. A stage accesses the codes of owned
    elements, or of full weights (`of_whole_weights`). Every row must have the buffers in `needed`.
    """
    sizes = {name: [base.numel() for base in tensors] for name, tensors in (*masters.items(), *bases.items())}
    for row in rows:
        matrix = row[Column.ROWS], row[Column.COLUMNS]
        start, numel = row[Column.START], row[Column.NUMEL]
        if min(*matrix, start, numel) < 0 or start + numel > math.prod(matrix):
            raise ValueError(f"elements {start} to {start + numel} are not inside a weight of {matrix[0]}x{matrix[1]}")
        for name in masters if numel else ():
            _check_inside(name, sizes[name], row[Column.MASTER_BASE], row[Column.MASTER_OFFSET], (0, numel))
        owned = byte_range(fmt, matrix, Span(start, start + numel), nominal) if numel else (0, 0)
        for name, extent, is_owned_in_part in _extents(fmt, matrix, nominal):
            base, offset = (row[column] for column in BUFFER_COLUMNS[name])
            if name in bases and (base >= 0 or (name in needed and (numel or not masters))):
                reached = owned if is_owned_in_part and not of_whole_weights else (0, extent)
                _check_inside(name, sizes[name], base, offset, reached)


@functools.lru_cache(maxsize=1024)
def _extents(fmt: FormatSpec, matrix: tuple[int, int], nominal: torch.dtype) -> list[tuple[str, int, bool]]:
    """Return a tuple for each buffer of a weight: (name, extent in the unit of its offset, True if
    a cast only reaches the owned elements).
    """
    cast = {"rowwise_data"} if fmt.columnwise is Columnwise.TRANSPOSE else {"rowwise_data", "columnwise_data"}
    extents = []
    for name, buffer in buffers(fmt, matrix, nominal).items():
        if buffer is not None:
            # Offsets of data count bytes, all others count elements.
            unit = buffer.dtype.itemsize if name.endswith("_data") else 1
            extents.append((name, math.prod(buffer.shape) * unit, name in cast))
    return extents


def _check_inside(name: str, sizes: Sequence[int], base: int, offset: int, reached: tuple[int, int]) -> None:
    first, last = reached
    if first == last:
        return
    if not 0 <= base < len(sizes):
        raise ValueError(f"{name} is in storage {base}, and the table has {len(sizes)}")
    if offset + first < 0 or offset + last > sizes[base]:
        raise ValueError(
            f"{name} needs elements {offset + first:,} to {offset + last:,} of its storage, which has {sizes[base]:,}: it was "
            "freed or made smaller (untyped_storage().resize_), so allocate it again, or build the weight again"
        )
