"""Piece: rows of a weight that are stored under a separate name.

A weight of any dimensions is a matrix here, `[prod(leading), last]`. Most readers of checkpoints
expect separate tensors for experts that a model has in one parameter, and for projections that it
computes in one product. Each of these tensors is a piece: some ranges of rows. Codes and scales are
cut at the same rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.formats.layout import round_up
from zerocast.serve.namings import Part
from zerocast.weight import QuantizedWeight

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
