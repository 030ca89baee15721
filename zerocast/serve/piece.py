"""Piece: rows of a weight that have a name of their own on the disk.

A weight is a matrix of its rows, whatever its dimensions, `[prod(leading), last]`. Experts in one
tensor, and projections that a model computes in one product, are stored apart by most readers: each
piece is some ranges of rows. Codes and scales are cut at the same rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.formats.layout import round_up
from zerocast.serve.namings import Part
from zerocast.weight import QuantizedWeight

Rows = range
# by parameter the stored name, or stored names with the ranges of rows that each of them has
Names = Mapping[str, str | Mapping[str, Sequence[Rows]]]


@dataclass(frozen=True)
class Piece:
    """A stored tensor: its name, the ranges of rows that it has of a weight, and its shape."""

    name: str
    rows: tuple[range, ...]
    shape: tuple[int, ...]


def whole(name: str, shape: Sequence[int]) -> Piece:
    """The piece that is a whole tensor."""
    rows = torch.Size(shape[:-1]).numel() if len(shape) > 1 else torch.Size(shape).numel()
    return Piece(name, (range(rows),), tuple(shape))


def named_pieces(name: str, shape: Sequence[int], names: Names) -> list[Piece]:
    """The pieces of a tensor as `names` says; a tensor that it does not name keeps its name.
    ValueError for rows that the tensor does not have.
    """
    given = names.get(name, name)
    if isinstance(given, str):
        return [whole(given, shape)]
    (held,), columns = whole(name, shape).rows, shape[-1:] if len(shape) > 1 else ()
    for key, rows in given.items():
        wrong = [r for r in rows if not (r.step == 1 and held.start <= r.start < r.stop <= held.stop)]
        if wrong:
            raise ValueError(f"names gives {key} the rows {wrong[0]} of {name}, whose rows are {held}")
    return [Piece(key, tuple(rows), (sum(map(len, rows)), *columns)) for key, rows in given.items()]


def ranges(rows: Tensor) -> tuple[range, ...]:
    """Row numbers, int64 in their order, as ranges of consecutive ones."""
    if not rows.numel():
        return ()
    cuts = (rows.diff() != 1).nonzero().view(-1) + 1
    return tuple(range(int(part[0]), int(part[-1]) + 1) for part in rows.tensor_split(cuts))


def cut(tensor: Tensor, piece: Piece) -> Tensor:
    """The rows of a plain tensor."""
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
    return _rows(rows, piece.rows).reshape(piece.shape)


def part_rows(part: Part, piece: Piece, rows: int) -> list[range]:
    """The rows of a part that a piece of a weight of so many `rows` has; ValueError where they
    divide a block.
    """
    assert part.height is not None
    if any(r.start % part.height or (r.stop % part.height and r.stop != rows) for r in piece.rows):
        raise ValueError(
            f"{piece.name} is rows {', '.join(f'[{r.start}, {r.stop})' for r in piece.rows[:3])} of a weight whose blocks "
            f"are {part.height} rows high: a piece begins and ends with a block"
        )
    return [range(r.start // part.height, -(-r.stop // part.height)) for r in piece.rows]


def cut_part(part: Part, piece: Piece, rows: int) -> Tensor:
    """The rows of a part of a weight of so many `rows`; ValueError where they divide a block."""
    return part.tensor if part.height is None else _rows(part.tensor, part_rows(part, piece, rows))


def block_rows(weight: QuantizedWeight, rows: range) -> tuple[QuantizedWeight, int]:
    """(a weight over the whole blocks of these rows, the first row that it has); nothing is
    copied.
    """
    height = weight.format.block[0] if weight.format.block else 1
    last, columns = weight.matrix_shape
    first, end = rows.start // height * height, min(round_up(rows.stop, height), last)
    held = {"rowwise_data": weight.rowwise_data[first:end]}
    scales, amax = weight.rowwise_scale_inv, weight.amax
    if scales is not None:
        step = height // weight.format.scale_repeat()[0]  # rows of the weight to a row of scales
        held["rowwise_scale_inv"] = scales[first // step : -(-end // step)] if weight.format.block else scales
    if amax is not None:
        held["amax"] = amax
    return QuantizedWeight.of_part((end - first, columns), weight.format, weight.dtype, held), first


def _rows(matrix: Tensor, rows: Sequence[range]) -> Tensor:
    parts = [matrix[r.start : r.stop] for r in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
