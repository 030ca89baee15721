"""Stage compute_scales: whole scale buffers and tensor amaxes from the reduced amaxes."""

from torch import Tensor

from zerocast.backends.descriptor import Column
from zerocast.backends.reference.blocks import fill_scales
from zerocast.backends.reference.scales import stored_scales
from zerocast.formats import AmaxPolicy, Block, Columnwise, FormatSpec
from zerocast.formats.layout import amax_grid, columnwise_scale_inv, rowwise_scale_inv


def grid_of(packed: Tensor, offset: int, block: Block | None, rows: int, columns: int) -> Tensor:
    """The amaxes of a whole weight as f32 `[down, across]`."""
    down, across = amax_grid(block, rows, columns)
    return packed[offset : offset + down * across].view(down, across).float()


def compute_scales(
    fmt: FormatSpec,
    packed: Tensor,
    table: Tensor,
    row_scales: list[Tensor],
    column_scales: list[Tensor],
    amaxes: list[Tensor],
    scales: list[Tensor],
    skip: Tensor | None,
) -> None:
    """Write scale buffers, padding included, and tensor amaxes from the reduced packed amaxes."""
    if skip is not None and bool(skip):
        return
    for row in table.tolist():
        rows, columns = row[Column.ROWS], row[Column.COLUMNS]
        grid = grid_of(packed, row[Column.ROW_AMAX], fmt.block, rows, columns)
        tensor_amax = None
        if fmt.has_tensor_amax:
            tensor_amax = amaxes[row[Column.AMAX_BASE]][row[Column.AMAX_OFFSET] :][:1].copy_(grid.amax().view(1))
        scale = None
        if fmt.amax_policy is AmaxPolicy.DELAYED:
            scale = scales[row[Column.SCALE_BASE]][row[Column.SCALE_OFFSET] :][:1]
        buffer = rowwise_scale_inv(fmt, rows, columns)
        assert buffer
        filled = fill_scales(fmt, stored_scales(fmt, grid, tensor_amax, scale), rows, buffer).view(-1)
        row_scales[row[Column.ROW_SCALE_BASE]][row[Column.ROW_SCALE_OFFSET] :][: filled.numel()] = filled
        if fmt.columnwise is Columnwise.OWN_GRID:
            grid = grid_of(packed, row[Column.COLUMN_AMAX], fmt.columnwise_block, rows, columns)
            buffer = columnwise_scale_inv(fmt, rows, columns)
            assert buffer
            filled = fill_scales(fmt, stored_scales(fmt, grid, None, None), rows, buffer).view(-1)
            column_scales[row[Column.COLUMN_SCALE_BASE]][row[Column.COLUMN_SCALE_OFFSET] :][: filled.numel()] = filled
