"""The descriptor table: everything a stage needs to know about each weight, one int64 row a weight.

A stage takes base tensors (whole storages, viewed as one-dimensional tensors of the role's dtype)
and this table. The number of launches then does not depend on the number of weights, and no op
takes a bare address. `csrc/descriptor.h` names the same columns; an extension whose columns differ
is refused at import.
"""

import enum

from torch import Tensor

from zerocast.formats import FormatSpec
from zerocast.formats.layout import Span, whole_block_rows


class Column(enum.IntEnum):
    """Columns of a descriptor row; -1 marks an absent buffer.

    Offsets count elements of the base's dtype, except data offsets, which count bytes.
    """

    ROWS = 0  # of the weight as a matrix
    COLUMNS = 1
    START = 2  # first owned element, row-major
    NUMEL = 3  # owned elements; 0 when this rank owns nothing
    MASTER_BASE = 4  # index into the list of masters
    MASTER_OFFSET = 5  # of element START
    ROW_AMAX = 6  # of the first rowwise amax in the packed buffer; the grid is not padded
    COLUMN_AMAX = 7  # of the first amax of an own columnwise grid
    SHARED_AMAX = 7  # two-level scales, which have no such grid: of a tensor amax that several weights share
    ROW_DATA_BASE = 8
    ROW_DATA_OFFSET = 9  # of element 0 of the weight; negative if only a later shard is stored
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
    # of a number in the packed buffer that becomes 1 where an owned master is NaN or Inf
    NOT_FINITE = 22


WIDTH = len(Column)


def check_whole_blocks(fmt: FormatSpec, table: Tensor) -> None:
    """For stage adam_cast: ValueError unless scales depend on nothing but whole rows of blocks that
    are owned. Reads the table.
    """
    if not fmt.casts_in_one_pass:
        raise ValueError(f"the scales of {fmt} depend on more than their own blocks: adam_amax, then partial_cast")
    columns = table[:, [Column.ROWS, Column.COLUMNS, Column.START, Column.NUMEL]]
    for row, (rows, width, start, numel) in enumerate(columns.tolist()):
        span = Span(start, start + numel)
        if numel and whole_block_rows(fmt, (rows, width), span) != span:
            raise ValueError(f"row {row}: elements {start} to {start + numel} of {rows}x{width} cut a block of {fmt}")
