"""The stages of a cast in plain torch, in the order in which a step runs them, then the stages that
read a weight, and those of gradients that are sent as FP8 (docs/formats/fp8_1x128.md).

This file is the specification: ../README.md describes the inputs and outputs of each stage, and
every other backend gives these bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.backends.descriptor import Column
from zerocast.backends.reference.codec import (
    decode,
    decode_e4m3,
    decode_e8m0,
    encode,
    encode_e4m3,
    pack,
    round_nominal,
    to_nominal,
    unpack,
)
from zerocast.backends.reference.scales import (
    FLT_MAX,
    ONE_2688TH,
    block_amax,
    decode_scales,
    divide,
    encode_scales,
    expand,
    fill_scales,
    scale_grid,
    stored_amax,
    stored_scales,
)
from zerocast.formats import AmaxPolicy, Block, Columnwise, FormatSpec, ScaleRule
from zerocast.formats.layout import (
    GradientMessage,
    Span,
    amax_grid,
    byte_range,
    columnwise_scale_inv,
    round_up,
    rowwise_scale_inv,
    upcast_operand,
)
from zerocast.formats.spec import UPCAST_EXPONENT


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
        height = block[0] if block else self.row[Column.ROWS]
        grid = grid_of(packed, offset, block, self.row[Column.ROWS], self.columns)
        return grid[self.first // height : -(-self.last // height)]


def partial_amax(fmt: FormatSpec, nominal: torch.dtype, masters: list[Tensor], table: Tensor, packed: Tensor) -> None:
    """Stage partial_amax: write the amax of the owned elements of every block that has any. Write a
    1 for each weight with an owned element that is NaN or Inf.
    """
    for row in table.tolist():
        window = Window.from_row(fmt, row)
        if window is None:
            continue
        if row[Column.NOT_FINITE] >= 0 and not bool(window.elements(masters).isfinite().all()):
            packed[row[Column.NOT_FINITE]] = 1.0
        canvas = window.canvas(masters, nominal)
        window.grid(packed, row[Column.ROW_AMAX], fmt.block).copy_(block_amax(canvas, fmt.block))
        if fmt.columnwise is Columnwise.OWN_GRID:
            amaxes = block_amax(canvas, fmt.columnwise_block)
            window.grid(packed, row[Column.COLUMN_AMAX], fmt.columnwise_block).copy_(amaxes)


def grid_of(packed: Tensor, offset: int, block: Block | None, rows: int, columns: int) -> Tensor:
    """Return the packed amaxes of a full weight, a view `[block_rows, block_columns]`."""
    block_rows, block_columns = amax_grid(block, rows, columns)
    return packed[offset : offset + block_rows * block_columns].view(block_rows, block_columns)


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
    """Stage compute_scales: compute complete scale buffers and tensor amaxes from the reduced
    amaxes.
    """
    if skip is not None and bool(skip):
        return
    for row in table.tolist():
        rows, columns = row[Column.ROWS], row[Column.COLUMNS]
        grid = grid_of(packed, row[Column.ROW_AMAX], fmt.block, rows, columns).float()
        tensor_amax = None
        if fmt.has_tensor_amax:
            largest = grid.amax().view(1)
            if fmt.scale_rule is ScaleRule.TWO_LEVEL and (shared := row[Column.SHARED_AMAX]) >= 0:
                largest = torch.maximum(largest, packed[shared : shared + 1].float())
            tensor_amax = amaxes[row[Column.AMAX_BASE]][row[Column.AMAX_OFFSET] :][:1]
            tensor_amax.copy_(stored_amax(fmt, largest))
        scale = None
        if fmt.amax_policy is AmaxPolicy.DELAYED:
            scale = scales[row[Column.SCALE_BASE]][row[Column.SCALE_OFFSET] :][:1]
        buffer = rowwise_scale_inv(fmt, rows, columns)
        assert buffer
        stored = stored_scales(fmt, grid, tensor_amax, scale)
        filled = fill_scales(stored, fmt.scale_repeat(), buffer).view(-1)
        row_scales[row[Column.ROW_SCALE_BASE]][row[Column.ROW_SCALE_OFFSET] :][: filled.numel()] = filled
        if fmt.columnwise is Columnwise.OWN_GRID:
            grid = grid_of(packed, row[Column.COLUMN_AMAX], fmt.columnwise_block, rows, columns).float()
            stored = stored_scales(fmt, grid, None, None)
        if fmt.columnwise in (Columnwise.OWN_GRID, Columnwise.SHARED):
            buffer = columnwise_scale_inv(fmt, rows, columns)
            assert buffer
            filled = fill_scales(stored, fmt.scale_repeat(columnwise=True), buffer).view(-1)
            column_scales[row[Column.COLUMN_SCALE_BASE]][row[Column.COLUMN_SCALE_OFFSET] :][: filled.numel()] = filled


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
    """Stage partial_cast: write the codes of the owned elements, and only those, to the half
    byte.
    """
    if skip is not None and bool(skip):
        return
    for row in table.tolist():
        window = Window.from_row(fmt, row)
        if window is None:
            continue
        out = row_data[row[Column.ROW_DATA_BASE]]
        if fmt.element is None:
            data = to_nominal(window.elements(masters), nominal).view(torch.uint8)
            first, last = _owned_bytes(fmt, nominal, row)
            out[row[Column.ROW_DATA_OFFSET] + first : row[Column.ROW_DATA_OFFSET] + last] = data.view(-1)
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


def _owned_bytes(fmt: FormatSpec, nominal: torch.dtype, row: list[int]) -> tuple[int, int]:
    span = Span(row[Column.START], row[Column.START] + row[Column.NUMEL])
    return byte_range(fmt, (row[Column.ROWS], row[Column.COLUMNS]), span, nominal)


def _scalar(bases: list[Tensor], base: int, offset: int) -> Tensor:
    return bases[base][offset : offset + 1]


def _write_bytes(out: Tensor, offset: int, start: int, codes: Tensor) -> None:
    out[offset + start :][: codes.numel()] = codes


def _write_nibbles(out: Tensor, offset: int, start: int, codes: Tensor) -> None:
    """Write 4-bit codes from element `start`. The other halves of the first and the last byte stay
    as they are.
    """
    head = start % 2
    tail = (start + codes.numel()) % 2
    if head:
        byte = offset + start // 2
        out[byte] = (out[byte] & 0x0F) | (codes[0] << 4)
        start += 1
        codes = codes[1:]
    if tail and codes.numel():
        byte = offset + (start + codes.numel()) // 2
        out[byte] = (out[byte] & 0xF0) | codes[-1]
        codes = codes[:-1]
    _write_bytes(out, offset, start // 2, codes[0::2] | (codes[1::2] << 4))


def roll_history(
    fmt: FormatSpec,
    table: Tensor,
    amaxes: list[Tensor],
    scales: list[Tensor],
    histories: list[Tensor],
    skip: Tensor | None,
) -> None:
    """Stage roll_history: shift each amax history by one and write the scale of the next cast."""
    if skip is not None and bool(skip):
        return
    for row in table.tolist():
        amax = amaxes[row[Column.AMAX_BASE]][row[Column.AMAX_OFFSET] :][:1]
        scale = scales[row[Column.SCALE_BASE]][row[Column.SCALE_OFFSET] :][:1]
        history = histories[row[Column.HISTORY_BASE]][row[Column.HISTORY_OFFSET] :][: fmt.amax_history_len]
        next_history, next_scale = rolled(fmt, amax, scale, history)
        history.copy_(next_history)
        scale.copy_(next_scale)


def rolled(fmt: FormatSpec, amax: Tensor, scale: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
    """Return the history f32[L] and scale f32[1] after a step whose reduced amax is `amax`.

    The formula is in docs/formats/fp8_delayed.md. The CPU never waits for the device.
    """
    assert fmt.element
    last = torch.where(amax != 0, amax, history[:1])
    rolled_history = torch.cat((torch.zeros_like(last), history[2:], last))[: history.numel()]
    chosen = last
    if fmt.amax_compute_algo == "max":
        chosen = torch.cat((history[1:], last)).amax().view(1)
    next_scale = divide(fmt.element.max * 2.0**-fmt.margin, chosen)
    next_scale = torch.where((chosen > 0) & (chosen < torch.inf), next_scale, scale)
    next_scale = torch.where(next_scale.isinf(), torch.full_like(next_scale, FLT_MAX), next_scale)
    # No amax was ever seen: both stay as they are.
    idle = last == 0
    return torch.where(idle, history, rolled_history), torch.where(idle, scale, next_scale)


def transpose(
    fmt: FormatSpec,
    table: Tensor,
    row_data: list[Tensor],
    row_scales: list[Tensor],
    column_data: list[Tensor],
    column_scales: list[Tensor],
) -> None:
    """Stage transpose: write the columnwise data and scales from the gathered rowwise bytes."""
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
        block_rows, block_columns = amax_grid(fmt.block, rows, columns)
        grid = scale_grid(stored, fmt.scale_repeat(), block_rows, block_columns)
        filled = fill_scales(grid.t(), fmt.scale_repeat(columnwise=True), target).view(-1)
        column_scales[row[Column.COLUMN_SCALE_BASE]][row[Column.COLUMN_SCALE_OFFSET] :][: filled.numel()] = filled


def dequantize(
    fmt: FormatSpec,
    data: Tensor,
    scale_inv: Tensor | None,
    amax: Tensor | None,
    rows: int,
    columns: int,
    columnwise: bool,
    out: Tensor,
) -> None:
    """Stage dequantize: write one direction of one weight to `out`, in the dtype of `out`."""
    if fmt.element is None:
        out.copy_(to_nominal(data, out.dtype))
        return
    assert scale_inv is not None
    transposed = columnwise and fmt.columnwise is Columnwise.TRANSPOSE
    height, width = (columns, rows) if transposed else (rows, columns)
    has_own_grid = columnwise and fmt.columnwise is Columnwise.OWN_GRID
    block = fmt.columnwise_block if has_own_grid else fmt.block
    codes = unpack(data) if fmt.elements_per_byte == 2 else data
    if block is None:
        stored = scale_inv.view(1, 1)
    else:
        stored = scale_grid(scale_inv, fmt.scale_repeat(columnwise), *amax_grid(block, height, width))
    value = decode(fmt.element, codes) * expand(decode_scales(fmt, stored, amax), block, height, width)
    out.copy_(to_nominal(value.t() if transposed else value, out.dtype))


def upcast(
    fmt: FormatSpec,
    data: Tensor,
    scale_inv: Tensor,
    amax: Tensor | None,
    rows: int,
    columns: int,
    transposed: bool,
    codes: Tensor,
    group_scale_inv: Tensor,
) -> None:
    """Stage upcast: write E4M3 codes with one f32 scale a scale group, or one of the tensor, that
    have the same values as the rowwise codes of a weight, or the transpose of them.
    """
    assert fmt.element and fmt.block
    if fmt.exact_scales:
        assert amax is not None
        stored = scale_grid(scale_inv, fmt.scale_repeat(), *amax_grid(fmt.block, rows, columns))
        value = decode(fmt.element, unpack(data)) * expand(decode_e4m3(stored) / 8, fmt.block, rows, columns)
        codes.copy_(encode_e4m3(value.t() if transposed else value))
        group_scale_inv.copy_(8 * (amax * ONE_2688TH))
        return
    assert fmt.scale_group
    blocks = fmt.scale_group[0] // fmt.block[0], fmt.scale_group[1] // fmt.block[1]
    exponent = scale_grid(scale_inv, fmt.scale_repeat(), *amax_grid(fmt.block, rows, columns)).int()
    largest = block_amax(exponent.float(), blocks).int()
    spread = expand(largest, blocks, *exponent.shape) - exponent
    factor = decode_e8m0((127 + UPCAST_EXPONENT - spread).clamp(min=0))
    value = decode(fmt.element, unpack(data)) * expand(factor, fmt.block, rows, columns)
    group_scale = decode_e8m0(largest) * 2.0**-UPCAST_EXPONENT
    if transposed:
        value, group_scale = value.t(), group_scale.t()
    codes.copy_(encode_e4m3(value))
    buffer = upcast_operand(fmt, *value.shape)[1]
    group_scale_inv.copy_(fill_scales(group_scale, (1, 1), buffer))


def quantize_gradient(grad: Tensor, parts: int, messages: Tensor) -> None:
    """Stage quantize_gradient: write the message of each of `parts` equal parts of a gradient."""
    layout = GradientMessage(grad.numel() // parts)
    groups = torch.zeros(parts, layout.groups * layout.GROUP, dtype=torch.float32, device=grad.device)
    groups[:, : layout.numel] = grad.view(parts, -1)
    groups = groups.view(parts, layout.groups, layout.GROUP)
    # torch's maximum is NaN if any element is.
    amax = groups.abs().amax(2)
    scale = divide(448.0, amax).clamp(max=FLT_MAX).masked_fill(amax == 0, 1.0)
    scale = scale.masked_fill(~amax.isfinite(), torch.nan)
    codes = encode_e4m3(groups * scale.unsqueeze(2)).view(parts, -1)
    # A NaN may have many bit patterns; this one is the same on every device.
    scale_inv = divide(1.0, scale).masked_fill(scale.isnan(), torch.nan)
    rows = messages.view(parts, layout.nbytes).zero_()
    rows[:, : layout.numel] = codes[:, : layout.numel]
    rows[:, layout.scales_at :][:, : 4 * layout.groups] = scale_inv.view(torch.uint8)


def add_gradients(messages: Tensor, parts: int, divisor: int, adds: bool, out: Tensor) -> None:
    """Stage add_gradients: add the messages of `parts` ranks, in FP8 or in the dtype of the
    gradient, in the order of the ranks, and divide by `divisor`.
    """
    if not out.numel():
        return
    is_fp8 = messages.dtype is torch.uint8
    total, *others = [_decoded(row, out.numel()) if is_fp8 else row.float() for row in messages.view(parts, -1)]
    for value in others:
        total = total + value
    mean = total / torch.full_like(total, divisor)
    out.copy_(out + mean if adds else mean)


def _decoded(message: Tensor, numel: int) -> Tensor:
    layout = GradientMessage(numel)
    scale_inv = message[layout.scales_at :][: 4 * layout.groups].view(torch.float32)
    return decode_e4m3(message[:numel]) * scale_inv.repeat_interleave(layout.GROUP)[:numel]
