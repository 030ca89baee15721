"""Stage partial_amax: the amax of every block that holds an owned element."""

import torch
from torch import Tensor

from zerocast.backends.descriptor import Column
from zerocast.backends.reference.blocks import block_amax
from zerocast.backends.reference.window import Window
from zerocast.formats import Columnwise, FormatSpec


def partial_amax(fmt: FormatSpec, nominal: torch.dtype, masters: list[Tensor], table: Tensor, packed: Tensor) -> None:
    """Write the amax of every block that holds an owned element, over the owned elements."""
    for row in table.tolist():
        window = Window.of(fmt, row)
        if window is None:
            continue
        canvas = window.canvas(masters, nominal)
        window.grid(packed, row[Column.ROW_AMAX], fmt.block).copy_(block_amax(canvas, fmt.block))
        if fmt.columnwise is Columnwise.OWN_GRID:
            amaxes = block_amax(canvas, fmt.columnwise_block)
            window.grid(packed, row[Column.COLUMN_AMAX], fmt.columnwise_block).copy_(amaxes)
