"""The unsharded cast of a full weight. Every plan, on any number of ranks and by any backend, gives
the bytes that this cast gives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from zerocast.backends.reference.codec import encode, pack, round_nominal, to_nominal
from zerocast.backends.reference.scales import (
    block_amax,
    encode_scales,
    expand,
    fill_scales,
    stored_amax,
    stored_scales,
)
from zerocast.formats import Columnwise, FormatSpec
from zerocast.formats.layout import check_shape, columnwise_scale_inv, rowwise_scale_inv, stored_matrices


@dataclass(frozen=True)
class Quantized:
    """All buffers of a cast weight, under the names that `QuantizedWeight` gives them."""

    rowwise_data: Tensor
    rowwise_scale_inv: Tensor | None
    columnwise_data: Tensor | None
    columnwise_scale_inv: Tensor | None
    amax: Tensor | None


def quantize(
    fmt: FormatSpec,
    master: Tensor,
    nominal: torch.dtype,
    scale: Tensor | None = None,
    tensor_amax: Tensor | None = None,
) -> Quantized:
    """Cast a full master of logical shape to `fmt` (docs/formats).

    `scale` is the f32[1] scale of delayed formats. Columnwise buffers are included, with the bytes
    that post-all-gather processing gives them. The master may also be a slice of rows of a larger
    weight that starts and ends at multiples of 512 rows. `tensor_amax`, f32[1], is then the amax of
    the full weight, and the result is that slice of every buffer. Raises ValueError for a shape
    that the format does not support.
    """
    check_shape(fmt, master.shape)
    count, (rows, columns) = stored_matrices(fmt, master.shape)
    if count > 1:
        matrices = master.reshape(count, rows, columns)
        return _one_after_another([quantize(fmt, matrix, nominal, scale, tensor_amax) for matrix in matrices])
    matrix = master.reshape(rows, columns)
    if fmt.element is None:
        return Quantized(to_nominal(matrix, nominal), None, None, None, None)
    x = round_nominal(matrix, nominal)

    grid = block_amax(x, fmt.block)
    if not fmt.has_tensor_amax:
        tensor_amax = None
    elif tensor_amax is None:
        tensor_amax = grid.amax().view(1)
    elif fmt.block is None:
        grid = tensor_amax.view(1, 1)
    if tensor_amax is not None:
        tensor_amax = stored_amax(fmt, tensor_amax)
    factors = encode_scales(fmt, grid, tensor_amax, scale)
    codes = encode(fmt.element, x * expand(factors, fmt.block, rows, columns))
    stored = stored_scales(fmt, grid, tensor_amax, scale)
    row_buffer = rowwise_scale_inv(fmt, rows, columns)
    assert row_buffer
    row_scales = fill_scales(stored, fmt.scale_repeat(), row_buffer)
    column_codes, column_scales = _columnwise(fmt, x, codes, stored, scale)
    if fmt.elements_per_byte == 2:
        codes = pack(codes)
        column_codes = None if column_codes is None else pack(column_codes)
    return Quantized(codes, row_scales, column_codes, column_scales, tensor_amax)


def _columnwise(
    fmt: FormatSpec, x: Tensor, codes: Tensor, stored: Tensor, scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the columnwise codes, one per byte, and their scale buffer, from the rowwise codes and
    scales. None for a buffer that the format lacks.
    """
    buffer = columnwise_scale_inv(fmt, *x.shape)
    if buffer is None:
        return None, None
    column_codes: Tensor | None = None
    if fmt.columnwise is Columnwise.OWN_GRID:
        grid = block_amax(x, fmt.columnwise_block)
        factors = encode_scales(fmt, grid, None, scale)
        assert fmt.element
        column_codes = encode(fmt.element, x * expand(factors, fmt.columnwise_block, *x.shape))
        stored = stored_scales(fmt, grid, None, scale)
    elif fmt.columnwise is Columnwise.TRANSPOSE:
        column_codes, stored = codes.t().contiguous(), stored.t()
    return column_codes, fill_scales(stored, fmt.scale_repeat(columnwise=True), buffer)


def _one_after_another(matrices: Sequence[Quantized]) -> Quantized:
    """Return the buffers of several matrices, whose formats have no value per tensor."""
    by_name: dict[str, Any] = {}
    for name in (field.name for field in fields(Quantized)):
        parts = [getattr(matrix, name) for matrix in matrices]
        by_name[name] = None if parts[0] is None else torch.cat(parts)
    return Quantized(**by_name)
