"""Stage partial_cast: the codes of the owned elements, written to the byte, or to the half byte."""

import torch
from torch import Tensor

from zerocast.backends.descriptor import Column
from zerocast.backends.reference.blocks import expand
from zerocast.backends.reference.codec import encode, to_nominal
from zerocast.backends.reference.scales import encode_scales
from zerocast.backends.reference.window import Window
from zerocast.formats import AmaxPolicy, Block, Columnwise, FormatSpec


def partial_cast(
    fmt: FormatSpec,
    nominal: torch.dtype,
    masters: list[Tensor],
    packed: Tensor,
    amaxes: list[Tensor],
    scales: list[Tensor],
    table: Tensor,
    row_data: list[Tensor],
    column_data: list[Tensor],
    skip: Tensor | None,
) -> None:
    """Write the codes of the owned elements, to the byte or the half byte."""
    if skip is not None and bool(skip):
        return
    for row in table.tolist():
        window = Window.of(fmt, row)
        if window is None:
            continue
        out = row_data[row[Column.ROW_DATA_BASE]]
        if fmt.element is None:
            data = to_nominal(window.elements(masters), nominal).view(torch.uint8)
            _at(out, row[Column.ROW_DATA_OFFSET] + row[Column.START] * nominal.itemsize, data)
            continue
        canvas = window.canvas(masters, nominal)
        amax = _scalar(amaxes, row[Column.AMAX_BASE], row[Column.AMAX_OFFSET]) if fmt.has_tensor_amax else None
        delayed = fmt.amax_policy is AmaxPolicy.DELAYED
        scale = _scalar(scales, row[Column.SCALE_BASE], row[Column.SCALE_OFFSET]) if delayed else None

        def codes(offset: int, block: Block | None, w: Window = window, x: Tensor = canvas) -> Tensor:
            grid = encode_scales(fmt, w.grid(packed, offset, block).float(), amax, scale)  # noqa: B023
            assert fmt.element
            return encode(fmt.element, x * expand(grid, block, *x.shape)).view(-1)[w.owned]

        write = _write_nibbles if fmt.elements_per_byte == 2 else _write_bytes
        write(out, row[Column.ROW_DATA_OFFSET], row[Column.START], codes(row[Column.ROW_AMAX], fmt.block))
        if fmt.columnwise is Columnwise.OWN_GRID:
            out = column_data[row[Column.COLUMN_DATA_BASE]]
            _write_bytes(
                out,
                row[Column.COLUMN_DATA_OFFSET],
                row[Column.START],
                codes(row[Column.COLUMN_AMAX], fmt.columnwise_block),
            )


def _scalar(bases: list[Tensor], base: int, offset: int) -> Tensor:
    return bases[base][offset : offset + 1]


def _at(out: Tensor, offset: int, data: Tensor) -> None:
    out[offset : offset + data.numel()] = data


def _write_bytes(out: Tensor, offset: int, start: int, codes: Tensor) -> None:
    _at(out, offset + start, codes)


def _write_nibbles(out: Tensor, offset: int, start: int, codes: Tensor) -> None:
    head, tail = start % 2, (start + codes.numel()) % 2
    if head:
        byte = offset + start // 2
        out[byte] = (out[byte] & 0x0F) | (codes[0] << 4)
        start, codes = start + 1, codes[1:]
    if tail and codes.numel():
        byte = offset + (start + codes.numel()) // 2
        out[byte] = (out[byte] & 0xF0) | codes[-1]
        codes = codes[:-1]
    _at(out, offset + start // 2, codes[0::2] | (codes[1::2] << 4))
