"""Grids of blocks over a matrix: amaxes down to a grid, and a grid back over the elements."""

import torch
from torch import Tensor

from zerocast.formats import Block, FormatSpec, ScaleRule
from zerocast.formats.layout import Buffer, amax_grid


def block_amax(x: Tensor, block: Block | None) -> Tensor:
    """The largest |x| of each block of an f32 matrix `[R, C]`, NaN ignored; the grid `[down, across]`."""
    rows, columns = x.shape
    down, across = amax_grid(block, rows, columns)
    height, width = block or (rows, columns)
    padded = x.new_zeros(down * height, across * width)
    padded[:rows, :columns] = torch.where(x.isnan(), 0.0, x.abs())
    return padded.view(down, height, across, width).amax((1, 3))


def expand(grid: Tensor, block: Block | None, rows: int, columns: int) -> Tensor:
    """Repeat each block's value over its elements: `[down, across]` to `[rows, columns]`."""
    if block is None:
        return grid.expand(rows, columns)
    over = grid.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return over[:rows, :columns]


def fill_scales(fmt: FormatSpec, grid: Tensor, rows: int, buffer: Buffer) -> Tensor:
    """The whole scale buffer: the grid in its corner, nvfp4 tiles repeated over their rows, padding as specified."""
    full = torch.full(buffer.shape, buffer.padding, dtype=buffer.dtype, device=grid.device)
    if fmt.scale_rule is ScaleRule.TWO_LEVEL:
        assert fmt.block
        grid = grid.repeat_interleave(fmt.block[0], 0)[:rows]
    if len(buffer.shape) == 1:
        return full.copy_(grid.view(1))
    full[: grid.shape[0], : grid.shape[1]] = grid
    return full
