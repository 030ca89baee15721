"""CastStatistics: the effect of a format on one master, computed by the reference backend.

The master is read in pieces of a million elements or 128 rows, whichever is more. A format with a
tensor amax reads it twice.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.backends.reference.codec import round_nominal, unpack
from zerocast.backends.reference.quantize import quantize
from zerocast.backends.reference.scales import block_amax
from zerocast.backends.reference.stages import dequantize, rolled
from zerocast.checkpoint.sources import TensorSource
from zerocast.checkpoint.sources.source import pieces, read_span
from zerocast.formats import AmaxPolicy, FormatSpec
from zerocast.formats.layout import Span, matrix_shape, stored_matrices
from zerocast.metrics import cast_meter
from zerocast.metrics.cast_meter import CastCounts

# The rows of a piece are a multiple of this, which is a multiple of the rows of every block.
ROWS = 128
# floor(log2) of the smallest f32.
LOWEST = -149
BINADES = 127 - LOWEST + 1


@dataclass(frozen=True)
class CastStatistics:
    """Statistics of one tensor and, if it has a format, of its cast.

    Attributes:
        zeros: share of the elements that are zero.
        nonfinite: number of elements that are NaN or Inf.
        saturated: share that would round beyond the largest code of its block.
        flushed: share that is not zero and decodes to zero.
        error: Frobenius norm of (cast - master) divided by the norm of the master, finite elements
            only.
        masters: nonzero finite elements of the master by power of two, from 2**LOWEST on.
        casts: the same for the decoded cast.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    amax: float
    zeros: float
    nonfinite: int
    saturated: float | None
    flushed: float | None
    error: float | None
    masters: tuple[int, ...]
    casts: tuple[int, ...] | None


@torch.no_grad()
def measure(
    source: TensorSource,
    key: str,
    fmt: FormatSpec | None = None,
    nominal: torch.dtype = torch.bfloat16,
    scale: Tensor | None = None,
    name: str = "",
) -> CastStatistics:
    """Return the statistics of the tensor `key`, and of its cast to `fmt` through the nominal
    dtype.

    `scale`, f32[1], is the scale of the last cast of a delayed format. Without it the scale is
    computed from the amax of the tensor. The format must take the shape of the tensor.
    """
    entry = source.entries[key]
    count, shape = (1, matrix_shape(entry.shape or (1,))) if fmt is None else stored_matrices(fmt, entry.shape or (1,))
    amax = None
    if fmt is not None and fmt.has_tensor_amax:
        amaxes = [block_amax(round_nominal(x, nominal), None).view(()) for x in _read(source, key, count, shape)]
        amax = torch.stack(amaxes).amax().view(1)
        if fmt.amax_policy is AmaxPolicy.DELAYED and scale is None:
            # The scale after a history that has only this amax.
            _, scale = rolled(fmt, amax, torch.ones(1), torch.zeros(fmt.amax_history_len))
    counts: list[CastCounts] = []
    zeros = 0
    masters, casts = (torch.zeros(BINADES, dtype=torch.int64) for _ in range(2))
    for x in _read(source, key, count, shape):
        finite = x[x.isfinite()]
        zeros += int((finite == 0).sum())
        masters += binades(finite)
        if fmt is None or fmt.element is None:
            square_sum = float(finite.double().square().sum())
            uncast = CastCounts(
                nonfinite=x.numel() - finite.numel(), square_sum=square_sum, amax=float(block_amax(x, None))
            )
            counts.append(uncast)
            continue
        codes, value = _cast(fmt, x, nominal, amax, scale)
        row = cast_meter.count(fmt.element, x, value, codes, torch.zeros(()))
        counts.append(CastCounts.of_row(row.tolist()))
        casts += binades(value[value.isfinite()])
    together = CastCounts.together(counts)
    numel = max(1, entry.numel)
    quantized = fmt is not None
    return CastStatistics(
        name=name or key,
        shape=entry.shape,
        format=str(fmt) if fmt else entry.dtype,
        amax=together.amax,
        zeros=zeros / numel,
        nonfinite=together.nonfinite,
        saturated=together.saturated / numel if quantized else None,
        flushed=together.flushed / numel if quantized else None,
        error=together.cast_error if quantized and together.square_sum else None,
        masters=tuple(masters.tolist()),
        casts=tuple(casts.tolist()) if quantized else None,
    )


def binades(values: Tensor) -> Tensor:
    """Return int64[BINADES]: the number of finite values in each binade (power of two). Zeros are
    not counted.
    """
    exponents = torch.frexp(values[values != 0].double()).exponent - 1
    return torch.bincount(exponents - LOWEST, minlength=BINADES)[:BINADES]


def _read(source: TensorSource, key: str, count: int, shape: tuple[int, int]) -> Iterator[Tensor]:
    """Read `count` matrices of a shape, one at a time, in pieces of rows."""
    for begin in range(0, count * math.prod(shape), math.prod(shape)):
        for span in pieces(*shape, ROWS):
            yield read_span(source, key, Span(begin + span.start, begin + span.stop)).view(-1, shape[1])


def _cast(
    fmt: FormatSpec, x: Tensor, nominal: torch.dtype, amax: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Cast rows of an f32 matrix; returns (codes, one per byte, decoded values f32), of its
    shape.
    """
    cast = quantize(fmt, x, nominal, scale, amax)
    value = torch.empty_like(x)
    rows, columns = x.shape
    dequantize(fmt, cast.rowwise_data, cast.rowwise_scale_inv, cast.amax, rows, columns, False, value)
    codes = unpack(cast.rowwise_data) if fmt.elements_per_byte == 2 else cast.rowwise_data
    return codes.view(x.shape), value
