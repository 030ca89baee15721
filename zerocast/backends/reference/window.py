"""Window: the owned elements of one weight as a matrix of full block rows, zero elsewhere."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.backends.descriptor import Column
from zerocast.backends.reference.codec import round_nominal
from zerocast.formats import Block, FormatSpec
from zerocast.formats.layout import amax_grid, round_up


@dataclass(frozen=True)
class Window:
    """Rows `[first, last)` of a weight: the full block rows that contain the owned span."""

    row: list[int]  # the weight's descriptor row
    first: int
    last: int

    @staticmethod
    def from_row(fmt: FormatSpec, row: list[int]) -> "Window | None":
        """Return the window of a descriptor row, or None if nothing is owned."""
        if row[Column.NUMEL] == 0:
            return None
        rows, columns = row[Column.ROWS], row[Column.COLUMNS]
        height = max(rows if b is None else b[0] for b in (fmt.exchange_block, fmt.columnwise_block or (1, 1)))
        start, stop = row[Column.START], row[Column.START] + row[Column.NUMEL]
        first = start // columns // height * height
        last = min(rows, round_up(round_up(stop, columns) // columns, height))
        return Window(row, first, last)

    @property
    def columns(self) -> int:
        """The number of columns of the weight."""
        return self.row[Column.COLUMNS]

    @property
    def owned(self) -> slice:
        """The owned elements within the flattened window."""
        start = self.row[Column.START] - self.first * self.columns
        return slice(start, start + self.row[Column.NUMEL])

    def elements(self, masters: list[Tensor]) -> Tensor:
        """Return the owned elements, flat, in the dtype of the master."""
        offset = self.row[Column.MASTER_OFFSET]
        return masters[self.row[Column.MASTER_BASE]][offset : offset + self.row[Column.NUMEL]]

    def canvas(self, masters: list[Tensor], nominal: torch.dtype) -> Tensor:
        """Return f32 `[last - first, columns]`: owned elements rounded to nominal, 0 elsewhere."""
        elements = self.elements(masters)
        canvas = elements.new_zeros((self.last - self.first) * self.columns, dtype=torch.float32)
        canvas[self.owned] = round_nominal(elements, nominal)
        return canvas.view(-1, self.columns)

    def grid(self, packed: Tensor, offset: int, block: Block | None) -> Tensor:
        """Return the amaxes of the window's blocks, a view `[block_rows, block_columns]` of the
        packed buffer.
        """
        block_rows, block_columns = amax_grid(block, self.row[Column.ROWS], self.columns)
        height = block[0] if block else self.row[Column.ROWS]
        grid = packed[offset : offset + block_rows * block_columns].view(block_rows, block_columns)
        return grid[self.first // height : -(-self.last // height)]
