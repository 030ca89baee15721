"""The descriptor table inside a kernel: which weight a program works on, and where its data lies."""

import triton
import triton.language as tl

from zerocast.backends.descriptor import WIDTH as _WIDTH
from zerocast.backends.descriptor import Column

WIDTH = tl.constexpr(_WIDTH)
ROWS = tl.constexpr(int(Column.ROWS))
COLUMNS = tl.constexpr(int(Column.COLUMNS))
START = tl.constexpr(int(Column.START))
NUMEL = tl.constexpr(int(Column.NUMEL))
MASTER_BASE = tl.constexpr(int(Column.MASTER_BASE))
MASTER_OFFSET = tl.constexpr(int(Column.MASTER_OFFSET))
ROW_AMAX = tl.constexpr(int(Column.ROW_AMAX))
COLUMN_AMAX = tl.constexpr(int(Column.COLUMN_AMAX))
ROW_DATA = tl.constexpr(int(Column.ROW_DATA_BASE))
COLUMN_DATA = tl.constexpr(int(Column.COLUMN_DATA_BASE))
ROW_SCALE = tl.constexpr(int(Column.ROW_SCALE_BASE))
COLUMN_SCALE = tl.constexpr(int(Column.COLUMN_SCALE_BASE))
AMAX = tl.constexpr(int(Column.AMAX_BASE))
SCALE = tl.constexpr(int(Column.SCALE_BASE))
HISTORY = tl.constexpr(int(Column.HISTORY_BASE))


@triton.jit
def find(firsts, n, tile):
    """The row that a tile belongs to: the last one whose first tile is not after it. Rows without tiles are passed over."""
    low = tile * 0
    high = low + n
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(firsts + middle) <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def address(bases, row, BASE: tl.constexpr, SIZE: tl.constexpr):
    """Address of element OFFSET of base BASE, as an integer; the offset's column follows the base's, SIZE is that of an element."""
    return tl.load(bases + tl.load(row + BASE)) + tl.load(row + BASE + 1) * SIZE
