"""StoredTensor: a tensor of a checkpoint with a weight, or a piece of one, made when asked for.

Codes and scales are views of the weight where its layout allows it: whole rows without padding.
Others (scales with padding, rows from several places, dequantized values) are copied, and only when
`make` is called. So a caller that fills buckets knows the sizes before memory is taken.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zerocast.serve.namings import Part, layout_of
from zerocast.serve.piece import Piece, block_rows, cut, joined_rows, part_rows
from zerocast.weight import QuantizedWeight
from zerocast.weight.validity import Use


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and its stored name. `make` returns it, contiguous."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor takes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def of_weight(
    weight: QuantizedWeight, naming: str, name: str, pieces: Sequence[Piece], moment: object = None
) -> Iterator[StoredTensor]:
    """Yield the tensors that store the pieces of a weight. Raises RuntimeError for a weight that
    was never cast, is partial, or older than its masters (`moment` as for `Validity.check`);
    ValueError for pieces that divide a block.
    """
    if weight.format.element is None:
        yield from of_plain(plain_value(weight), pieces, weight.dtype)
        return
    weight.check(Use.SEND, moment)
    weight.wait()
    for tensors in by_piece(weight, naming, name, pieces):
        yield from tensors


def by_piece(
    weight: QuantizedWeight, naming: str, name: str, pieces: Sequence[Piece]
) -> Iterator[Sequence[StoredTensor]]:
    """Yield the tensors that store each piece of a quantized weight. A weight on the meta device
    gives their names, shapes and dtypes. Raises ValueError for pieces that divide a block.
    """
    _, (rows, _) = weight.stored_matrices
    if naming == "bf16":
        matrices = weight.matrices()
        for piece in pieces:
            make = partial(_dequantized, weight, matrices, piece)
            yield [StoredTensor(piece.name, torch.bfloat16, piece.shape, make)]
        return
    layout = layout_of(naming, name, weight.format)
    parts = layout.parts(weight)
    for piece in pieces:
        stored = [_of_part(piece.name + suffix, part, piece, rows) for suffix, part in parts.items()]
        if layout.has_shape:
            make = partial(torch.tensor, piece.shape, device=weight.device)
            stored.append(StoredTensor(f"{piece.name}_shape", torch.int64, (len(piece.shape),), make))
        yield stored


def plain_value(tensor: Tensor) -> Tensor:
    """Return the value of a tensor that is not quantized. Raises RuntimeError as from
    `of_weight`.
    """
    if not isinstance(tensor, QuantizedWeight):
        return tensor
    tensor.check(Use.SEND)
    tensor.wait()
    return tensor.rowwise_data.view(tensor.shape)


def of_plain(tensor: Tensor, pieces: Sequence[Piece], dtype: torch.dtype) -> Iterator[StoredTensor]:
    """Yield the tensors that store the pieces of a tensor that is not quantized, in this dtype."""
    for piece in pieces:
        yield StoredTensor(piece.name, dtype, piece.shape, partial(_cut_plain, tensor, piece, dtype))


def _of_part(name: str, part: Part, piece: Piece, rows: int) -> StoredTensor:
    tensor = part.tensor
    if part.height is None:
        return StoredTensor(name, tensor.dtype, tuple(tensor.shape), tensor.contiguous)
    own = part_rows(part, piece, rows)
    shape = sum(map(len, own)), *tensor.shape[1:]
    return StoredTensor(name, tensor.dtype, shape, lambda: joined_rows(tensor, own).contiguous())


def _cut_plain(tensor: Tensor, piece: Piece, dtype: torch.dtype) -> Tensor:
    return cut(tensor.detach(), piece).to(dtype).contiguous()


def _dequantized(weight: QuantizedWeight, matrices: Sequence[QuantizedWeight], piece: Piece) -> Tensor:
    """Return the values of a piece, bf16, without dequantizing the other pieces of the weight.
    `matrices` are those that it is stored in.
    """
    _, (rows, columns) = weight.stored_matrices
    if len(matrices) == 1 and piece.rows == (range(rows),):
        return weight.dequantize().to(torch.bfloat16).view(piece.shape)
    values = torch.empty(piece.shape, dtype=torch.bfloat16, device=weight.device)
    destinations = values.view(-1, columns).split([len(r) for r in piece.rows])
    for destination, r in zip(destinations, piece.rows, strict=True):
        for index in range(r.start // rows, -(-r.stop // rows)):
            first_row = index * rows
            inside = range(max(r.start - first_row, 0), min(r.stop - first_row, rows))
            blocks, first = block_rows(matrices[index], inside)
            target = destination[first_row + inside.start - r.start :][: len(inside)]
            target.copy_(blocks.dequantize()[inside.start - first : inside.stop - first])
    return values
