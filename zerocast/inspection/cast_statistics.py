"""CastStatistics: the effect of a format on one master, computed by the reference backend.

The master is read in pieces of a million elements or 128 rows, whichever is more. A format with a
tensor amax reads it twice.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.backends.reference.codec import decode, encode, round_nominal
from zerocast.backends.reference.scales import (
    block_amax,
    decode_scales,
    encode_scales,
    expand,
    stored_amax,
    stored_scales,
)
from zerocast.checkpoint.sources import TensorSource
from zerocast.checkpoint.sources.source import pieces, read_span
from zerocast.formats import AmaxPolicy, FormatSpec
from zerocast.formats.layout import Span, matrix_shape, stored_matrices

# The rows of a piece are a multiple of this, which is a multiple of the rows of every block.
ROWS = 128
# floor(log2) of the smallest f32.
LOWEST = -149
BINADES = 127 - LOWEST + 1
# A scaled value above the limit of an element would round to a larger code than the element has.
LIMITS = {"e4m3": 464.0, "e5m2": 61440.0, "e2m1": 7.0, "int4": 7.5}


@dataclass(frozen=True)
class CastStatistics:
    """Statistics of one tensor and, if it has a format, of its cast.

    Attributes:
        zeros: share of the elements that are zero.
        nonfinite: number of elements that are NaN or Inf.
        saturated: share that would round beyond the largest code of its block.
        flushed: share that is not zero and decodes to zero.
        error: Frobenius norm of (cast - master) over that of the master, finite elements only.
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


class _Sums:
    """Sums over the pieces of one tensor."""

    def __init__(self) -> None:
        # Numbers of elements.
        self.zeros = 0
        self.nonfinite = 0
        self.saturated = 0
        self.flushed = 0
        self.amax = 0.0
        # The sums of the squares of the master, and of (cast - master).
        self.squares = 0.0
        self.errors = 0.0
        self.masters = torch.zeros(BINADES, dtype=torch.int64)
        self.casts = torch.zeros(BINADES, dtype=torch.int64)

    def add_master(self, x: Tensor) -> None:
        finite = x[x.isfinite()]
        self.nonfinite += x.numel() - finite.numel()
        self.zeros += int((finite == 0).sum())
        self.amax = max(self.amax, float(block_amax(x, None)))
        self.squares += float(finite.double().square().sum())
        self.masters += binades(finite)

    def add_cast(self, master: Tensor, scaled: Tensor, cast: Tensor, limit: float) -> None:
        finite = master.isfinite()
        self.saturated += int((finite & (scaled.abs() > limit) & (cast != 0)).sum())
        self.flushed += int((finite & (master != 0) & (cast == 0)).sum())
        self.errors += float((cast.double() - master.double())[finite].square().sum())
        self.casts += binades(cast[cast.isfinite()])


@torch.no_grad()
def measure(
    source: TensorSource,
    key: str,
    fmt: FormatSpec | None = None,
    nominal: torch.dtype = torch.bfloat16,
    scale: Tensor | None = None,
    name: str = "",
) -> CastStatistics:
    """Statistics of the tensor `key`, and of its cast to `fmt` through the nominal dtype.

    `scale`, f32[1], is the scale of the last cast of a delayed format. Without it the scale is
    computed from the amax of the tensor. The format must take the shape of the tensor.
    """
    entry = source.entries[key]
    sums = _Sums()
    count, shape = (1, matrix_shape(entry.shape or (1,))) if fmt is None else stored_matrices(fmt, entry.shape or (1,))
    amax = None
    if fmt is not None and fmt.has_tensor_amax:
        amaxes = [block_amax(round_nominal(x, nominal), None).view(()) for x in _read(source, key, count, shape)]
        amax = stored_amax(fmt, torch.stack(amaxes).amax().view(1))
    if fmt is not None and fmt.amax_policy is AmaxPolicy.DELAYED and scale is None:
        assert amax is not None
        scale = _seed(fmt, amax)
    for x in _read(source, key, count, shape):
        sums.add_master(x)
        if fmt is not None and fmt.element is not None:
            sums.add_cast(x, *_cast(fmt, round_nominal(x, nominal), amax, scale), LIMITS[fmt.element.name])
    numel = max(1, entry.numel)
    quantized = fmt is not None
    return CastStatistics(
        name=name or key,
        shape=entry.shape,
        format=str(fmt) if fmt else entry.dtype,
        amax=sums.amax,
        zeros=sums.zeros / numel,
        nonfinite=sums.nonfinite,
        saturated=sums.saturated / numel if quantized else None,
        flushed=sums.flushed / numel if quantized else None,
        error=(sums.errors / sums.squares) ** 0.5 if quantized and sums.squares else None,
        masters=tuple(sums.masters.tolist()),
        casts=tuple(sums.casts.tolist()) if quantized else None,
    )


def binades(values: Tensor) -> Tensor:
    """int64[BINADES]: the number of finite values in each binade (power of two). Zeros are not
    counted.
    """
    exponents = torch.frexp(values[values != 0].double()).exponent - 1
    return torch.bincount(exponents - LOWEST, minlength=BINADES)[:BINADES]


def _read(source: TensorSource, key: str, count: int, shape: tuple[int, int]) -> Iterator[Tensor]:
    """Read so many matrices of a shape, one after another, in pieces of rows."""
    for begin in range(0, count * math.prod(shape), math.prod(shape)):
        for span in pieces(*shape, ROWS):
            yield read_span(source, key, Span(begin + span.start, begin + span.stop)).view(-1, shape[1])


def _seed(fmt: FormatSpec, amax: Tensor) -> Tensor:
    """The scale after a history that has this amax alone (docs/formats/fp8_delayed.md)."""
    assert fmt.element
    known = (amax > 0) & amax.isfinite()
    seeded = torch.full_like(amax, fmt.element.max * 2.0**-fmt.margin) / amax
    return torch.where(known, seeded.clamp(max=torch.finfo(torch.float32).max), torch.ones_like(amax))


def _cast(fmt: FormatSpec, x: Tensor, amax: Tensor | None, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cast an f32 matrix; returns (scaled values before encoding, decoded values), f32 matrices."""
    assert fmt.element
    if fmt.block is None:
        assert amax is not None
        grid = amax.view(1, 1)
    else:
        grid = block_amax(x, fmt.block)
    scaled = x * expand(encode_scales(fmt, grid, amax, scale), fmt.block, *x.shape)
    stored = decode_scales(fmt, stored_scales(fmt, grid, amax, scale), amax)
    return scaled, decode(fmt.element, encode(fmt.element, scaled)) * expand(stored, fmt.block, *x.shape)
