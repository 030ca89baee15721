"""StoredTensor: a tensor of a checkpoint with a weight, or a piece of one, made when asked for.

A Piece is rows of a weight that are stored under a separate name. A weight of any dimensions is a
matrix here, `[prod(leading), last]`. Most readers of checkpoints expect separate tensors for
experts that a model has in one parameter, and for projections that it computes in one product. Each
of these tensors is a piece: some ranges of rows. Codes and scales are cut at the same rows.

Codes and scales are views of the weight where its layout allows it: whole rows without padding.
Others (scales with padding, rows from several places, dequantized values) are copied, and only when
`make` is called. So a caller that fills buckets knows the sizes before memory is taken.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zerocast.formats.layout import round_up
from zerocast.serve.namings import Part, layout_of
from zerocast.weight import QuantizedWeight
from zerocast.weight.validity import Use

Rows = range
# By parameter: its stored name, or its stored names with the ranges of rows that each of them has.
Names = Mapping[str, str | Mapping[str, Sequence[Rows]]]


@dataclass(frozen=True)
class Piece:
    """A stored tensor: its name, the ranges of rows that it has of a weight, and its shape."""

    name: str
    rows: tuple[range, ...]
    shape: tuple[int, ...]


def whole(name: str, shape: Sequence[int]) -> Piece:
    """Return the piece that is a whole tensor."""
    rows = torch.Size(shape[:-1]).numel() if len(shape) > 1 else torch.Size(shape).numel()
    return Piece(name, (range(rows),), tuple(shape))


def named_pieces(name: str, shape: Sequence[int], names: Names) -> list[Piece]:
    """Return the pieces of a tensor as `names` says; a tensor that it does not name keeps its name.
    Raises ValueError for rows that the tensor does not have.
    """
    given = names.get(name, name)
    if isinstance(given, str):
        return [whole(given, shape)]
    (all_rows,) = whole(name, shape).rows
    columns = shape[-1:] if len(shape) > 1 else ()
    for key, rows in given.items():
        wrong = [r for r in rows if not (r.step == 1 and all_rows.start <= r.start < r.stop <= all_rows.stop)]
        if wrong:
            raise ValueError(f"names gives {key} the rows {wrong[0]} of {name}, whose rows are {all_rows}")
    return [Piece(key, tuple(rows), (sum(map(len, rows)), *columns)) for key, rows in given.items()]


def ranges(rows: Tensor) -> tuple[range, ...]:
    """Ranges of consecutive numbers among row numbers, int64[n], in their order."""
    if not rows.numel():
        return ()
    cuts = (rows.diff() != 1).nonzero().view(-1) + 1
    return tuple(range(int(run[0]), int(run[-1]) + 1) for run in rows.tensor_split(cuts))


def cut(tensor: Tensor, piece: Piece) -> Tensor:
    """Return the rows of a plain tensor that belong to a piece."""
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
    return joined_rows(rows, piece.rows).reshape(piece.shape)


def part_rows(part: Part, piece: Piece, rows: int) -> list[range]:
    """Return the ranges of a part's rows that belong to a piece of a weight that is stored in
    matrices of `rows` rows.

    Raises ValueError for a piece that divides a block, whose scale it would share with another
    piece.
    """
    height = part.height
    assert height is not None

    def block_row(row: int) -> int:
        """Return the first block row that begins at this row of the weight or after it."""
        matrix, inside = divmod(row, rows)
        return matrix * -(-rows // height) + -(-inside // height)

    if any(end % rows % height for r in piece.rows for end in (r.start, r.stop)):
        raise ValueError(
            f"{piece.name} is rows {', '.join(f'[{r.start}, {r.stop})' for r in piece.rows[:3])} of a weight whose blocks "
            f"are {part.height} rows high: a piece begins and ends with a block"
        )
    return [range(block_row(r.start), block_row(r.stop)) for r in piece.rows]


def block_rows(weight: QuantizedWeight, rows: range) -> tuple[QuantizedWeight, int]:
    """Return a weight over the blocks that contain these rows, and its first row. Nothing is
    copied.
    """
    height = weight.format.block[0] if weight.format.block else 1
    num_rows, columns = weight.matrix_shape
    first, end = rows.start // height * height, min(round_up(rows.stop, height), num_rows)
    buffers = {"rowwise_data": weight.rowwise_data[first:end]}
    scales, amax = weight.rowwise_scale_inv, weight.amax
    if scales is not None:
        # The rows of the weight for which one row of scales holds.
        step = height // weight.format.scale_repeat()[0]
        buffers["rowwise_scale_inv"] = scales[first // step : -(-end // step)] if weight.format.block else scales
    if amax is not None:
        buffers["amax"] = amax
    return QuantizedWeight.of_part((end - first, columns), weight.format, weight.dtype, buffers), first


def joined_rows(matrix: Tensor, rows: Sequence[range]) -> Tensor:
    """Return the rows of some ranges, in their order: a view of one range, a copy of several."""
    parts = [matrix[r.start : r.stop] for r in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
