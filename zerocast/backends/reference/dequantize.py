"""Stage dequantize: one direction of one weight back to floating point."""

from torch import Tensor

from zerocast.backends.reference.blocks import expand
from zerocast.backends.reference.codec import decode, to_nominal, unpack
from zerocast.backends.reference.scales import decode_scales
from zerocast.formats import Columnwise, FormatSpec, ScaleRule
from zerocast.formats.layout import amax_grid


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
    """Write one direction of one weight to `out`, in the dtype of `out`."""
    if fmt.element is None:
        out.copy_(to_nominal(data, out.dtype))
        return
    assert scale_inv is not None
    transposed = columnwise and fmt.columnwise is Columnwise.TRANSPOSE
    height, width = (columns, rows) if transposed else (rows, columns)
    own = columnwise and fmt.columnwise is Columnwise.OWN_GRID
    block = fmt.columnwise_block if own else fmt.block
    codes = unpack(data) if fmt.elements_per_byte == 2 else data
    down, across = amax_grid(block, height, width)
    step = fmt.block[0] if fmt.block and fmt.scale_rule is ScaleRule.TWO_LEVEL else 1
    stored = scale_inv.view(1, 1) if block is None else scale_inv[: down * step : step, :across]
    value = decode(fmt.element, codes) * expand(decode_scales(fmt, stored, amax), block, height, width)
    out.copy_(to_nominal(value.t() if transposed else value, out.dtype))
