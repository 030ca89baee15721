"""Stage transpose: columnwise copies from the gathered rowwise bytes."""

from torch import Tensor

from zerocast.backends.descriptor import Column
from zerocast.backends.reference.blocks import fill_scales
from zerocast.backends.reference.codec import pack, unpack
from zerocast.formats import FormatSpec, ScaleRule
from zerocast.formats.layout import amax_grid, columnwise_scale_inv, rowwise_scale_inv


def transpose(
    fmt: FormatSpec,
    table: Tensor,
    row_data: list[Tensor],
    row_scales: list[Tensor],
    column_data: list[Tensor],
    column_scales: list[Tensor],
) -> None:
    """Write columnwise data and scales from all rowwise bytes."""
    for row in table.tolist():
        rows, columns = row[Column.ROWS], row[Column.COLUMNS]
        width = columns // fmt.elements_per_byte
        data = row_data[row[Column.ROW_DATA_BASE]][row[Column.ROW_DATA_OFFSET] :][: rows * width].view(rows, width)
        out = column_data[row[Column.COLUMN_DATA_BASE]][row[Column.COLUMN_DATA_OFFSET] :][: rows * width]
        out.copy_((pack(unpack(data).t()) if fmt.elements_per_byte == 2 else data.t()).reshape(-1))
        if fmt.block is None:
            continue
        source, target = rowwise_scale_inv(fmt, rows, columns), columnwise_scale_inv(fmt, rows, columns)
        assert source and target
        flat = row_scales[row[Column.ROW_SCALE_BASE]][row[Column.ROW_SCALE_OFFSET] :]
        stored = flat[: source.shape[0] * source.shape[1]].view(source.shape)
        down, across = amax_grid(fmt.block, rows, columns)
        step = fmt.block[0] if fmt.scale_rule is ScaleRule.TWO_LEVEL else 1
        grid = stored[: down * step : step, :across]
        filled = fill_scales(fmt, grid.t(), columns, target).view(-1)
        column_scales[row[Column.COLUMN_SCALE_BASE]][row[Column.COLUMN_SCALE_OFFSET] :][: filled.numel()] = filled
