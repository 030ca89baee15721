"""OwnedPart: the owned elements of a weight, as masters, as codes and as decoded values."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zerocast import backends
from zerocast.backends import ops
from zerocast.backends.reference.codec import decode, encode, unpack
from zerocast.formats import Element, ScaleRule
from zerocast.formats.layout import Span, byte_range, round_up
from zerocast.verification.master_views import MasterView

PIECE = 2**20  # elements; a measurement needs about ten times as many bytes of memory


@dataclass(frozen=True)
class OwnedPart:
    """A quantized weight and its owned masters; reading its bytes waits for a gather in flight."""

    owned: MasterView

    @property
    def numel(self) -> int:
        """The number of elements owned here."""
        return 0 if self.owned.master is None else self.owned.span.numel

    @cached_property
    def element(self) -> Element:
        """The element type of the codes."""
        element: Element | None = self.owned.weight.format.halves[0].element
        assert element is not None, self.owned.name
        return element

    def data(self) -> Tensor:
        """A view of the bytes with the owned codes; a byte at an end may also hold another
        rank's code.
        """
        weight = self.owned.weight
        first, last = byte_range(weight.format.halves[0], weight.matrix_shape, self._span, weight.dtype)
        return weight.rowwise_data.view(-1)[first:last]

    def pieces(self) -> Iterator[Span]:
        """Cut the owned span at whole rows of blocks into pieces of about PIECE elements."""
        rows, columns = self.owned.weight.matrix_shape
        height = self._block_rows
        step = max(1, PIECE // (columns * height)) * height
        first = self._span.start // columns // height * height
        for row in range(first, rows, step):
            piece = Span(row * columns, (row + step) * columns).intersect(self._span)
            if piece.numel:
                yield piece

    def master(self, piece: Span) -> Tensor:
        """The masters of a piece, flat, as f32."""
        assert self.owned.master is not None
        start = piece.start - self._span.start
        return self.owned.master.detach()[start : start + piece.numel].to(self.owned.weight.device).float()

    def codes(self, piece: Span, data: Tensor) -> Tensor:
        """The codes of a piece, flat uint8, one a byte; `data` is bytes as `data()` returns
        them.
        """
        if self.owned.weight.format.halves[0].elements_per_byte == 1:
            start = piece.start - self._span.start
            return data[start : start + piece.numel]
        first = self._span.start // 2
        both = unpack(data[piece.start // 2 - first : -(-piece.stop // 2) - first])
        return both[piece.start % 2 : piece.start % 2 + piece.numel]

    def values(self, piece: Span) -> Tensor:
        """The decoded values of a piece, flat, as f32."""
        weight = self.owned.weight
        rows, columns = weight.matrix_shape
        first = piece.start // columns // self._block_rows * self._block_rows
        last = min(rows, round_up(piece.stop, columns) // columns)
        scale = weight.rowwise_scale_inv
        if scale is not None and weight.format.halves[0].block:  # FP32 scales: a row for each block row
            scale = scale[first // (self._block_rows if weight.format.halves[0].scale_rule is ScaleRule.FP32 else 1) :]
        data, backend = weight.rowwise_data[first:last], backends.choose(weight.device)
        fixed = weight.amax, last - first, columns, False, torch.float32
        value: Tensor = ops.dequantize(backend, str(weight.format.halves[0]), data, scale, *fixed)
        start = piece.start - first * columns
        return value.view(-1)[start : start + piece.numel]

    @property
    def _span(self) -> Span:
        return self.owned.span if self.numel else Span(0, 0)

    @property
    def _block_rows(self) -> int:
        block = self.owned.weight.format.halves[0].block
        return block[0] if block else 1


@functools.cache
def largest_code(element: Element) -> int:
    """The code of the largest finite value of an element."""
    return int(encode(element, torch.tensor([element.max], dtype=torch.float32)))


@functools.cache
def overshoot(element: Element) -> float:
    """The factor above the largest value beyond which a value is clipped rather than rounded."""
    top = largest_code(element)
    below, largest = decode(element, torch.tensor([top - 1, top], dtype=torch.uint8)).tolist()
    return 1.0 + 0.5 * float(largest - below) / float(largest)
