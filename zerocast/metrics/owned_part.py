"""OwnedPart: the elements of a weight that this rank owns, as masters, codes and decoded values."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zerocast import backends
from zerocast.backends import ops
from zerocast.backends.reference.codec import decode, encode, unpack
from zerocast.formats import Element
from zerocast.formats.layout import Span, byte_range, round_up, split_by_matrix
from zerocast.verification.master_views import MasterView

# Elements of a piece. A measurement needs temporary memory of about ten bytes per element.
PIECE = 2**20


@dataclass(frozen=True)
class OwnedPart:
    """A quantized weight and its owned masters. Reading the bytes waits for a gather in flight."""

    owned: MasterView

    @property
    def numel(self) -> int:
        """The number of elements owned here."""
        return 0 if self.owned.master is None else self.owned.span.numel

    @cached_property
    def element(self) -> Element:
        """The element type of the codes."""
        element: Element | None = self.owned.weight.format.element
        assert element is not None, self.owned.name
        return element

    def data(self) -> Tensor:
        """Return a view of the bytes with the owned codes. With 4-bit codes, the first and the last
        byte may also hold a code of another rank.
        """
        weight = self.owned.weight
        first, last = byte_range(weight.format, weight.matrix_shape, self._span, weight.dtype)
        return weight.rowwise_data.view(-1)[first:last]

    def pieces(self) -> Iterator[Span]:
        """Split the owned span into pieces of about PIECE elements, at boundaries of block rows, so
        that `values` need not decode a block twice.
        """
        weight, height = self.owned.weight, self._block_rows
        _, (rows, columns) = weight.stored_matrices
        step = max(1, PIECE // (columns * height)) * height
        for number, own, _ in split_by_matrix(weight.format, weight.shape, self._span):
            begin = number * rows * columns
            first = own.start // columns // height * height
            for row in range(first, rows, step):
                piece = Span(row * columns, (row + step) * columns).intersect(own)
                if piece.numel:
                    yield Span(begin + piece.start, begin + piece.stop)

    def master(self, piece: Span) -> Tensor:
        """Return the masters of a piece, flat, as f32."""
        assert self.owned.master is not None
        start = piece.start - self._span.start
        return self.owned.master.detach()[start : start + piece.numel].to(self.owned.weight.device).float()

    def codes(self, piece: Span, data: Tensor) -> Tensor:
        """Return the codes of a piece, flat uint8, one per byte. `data` is the result of `data()`,
        now or at an earlier time.
        """
        if self.owned.weight.format.elements_per_byte == 1:
            start = piece.start - self._span.start
            return data[start : start + piece.numel]
        # Two codes per byte: unpack all bytes, then drop the code before an odd start.
        first_byte = self._span.start // 2
        unpacked = unpack(data[piece.start // 2 - first_byte : -(-piece.stop // 2) - first_byte])
        return unpacked[piece.start % 2 : piece.start % 2 + piece.numel]

    def values(self, piece: Span) -> Tensor:
        """Return the decoded values of a piece, flat, as f32."""
        # Decode full rows, from the beginning of a block row, so that the scales of the part begin
        # at a row of the scale buffer.
        weight = self.owned.weight
        weight.wait()
        count, (rows, columns) = weight.stored_matrices
        number, begin = divmod(piece.start, rows * columns)
        buffers = weight.state.buffers if count == 1 else weight.state.matrix(number).buffers
        first = begin // columns // self._block_rows * self._block_rows
        last = min(rows, round_up(begin + piece.numel, columns) // columns)
        rowwise_data, scale = buffers["rowwise_data"], buffers["rowwise_scale_inv"]
        assert rowwise_data is not None
        if scale is not None and weight.format.block:
            # A buffer of bytes has a row per row, the others have a row per block row.
            has_row_per_block = weight.format.scale_dtype is not torch.uint8
            scale = scale[first // (self._block_rows if has_row_per_block else 1) :]
        data = rowwise_data[first:last]
        backend = backends.choose(weight.device)
        options = weight.amax, last - first, columns, False, torch.float32
        value: Tensor = ops.dequantize(backend, str(weight.format), data, scale, *options)
        start = begin - first * columns
        return value.view(-1)[start : start + piece.numel]

    @property
    def _span(self) -> Span:
        return self.owned.span if self.numel else Span(0, 0)

    @property
    def _block_rows(self) -> int:
        block = self.owned.weight.format.block
        return block[0] if block else 1


@functools.cache
def largest_code(element: Element) -> int:
    """Return the code of the largest finite value of an element."""
    return int(encode(element, torch.tensor([element.max], dtype=torch.float32)))


@functools.cache
def overshoot(element: Element) -> float:
    """Return the largest ratio of |x| to the largest finite value at which x is still rounded to
    it. A larger x is clipped.
    """
    top = largest_code(element)
    below, largest = decode(element, torch.tensor([top - 1, top], dtype=torch.uint8)).tolist()
    # Half a step above the largest value, if the format continued.
    return 1.0 + 0.5 * float(largest - below) / float(largest)
