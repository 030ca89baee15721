"""Piece: rows of a weight that have a name of their own on the disk.

A weight is a matrix of its rows, whatever its dimensions, `[prod(leading), last]`. Experts in one
tensor, and projections that a model computes in one product, are stored apart by most readers: each
piece is some ranges of rows. Codes and scales are cut at the same rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.serve.namings import Part


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


def cut_part(part: Part, piece: Piece, rows: int) -> Tensor:
    """The rows of a part of a weight of so many `rows`; ValueError where they divide a block."""
    if part.height is None:
        return part.tensor
    if any(r.start % part.height or (r.stop % part.height and r.stop != rows) for r in piece.rows):
        raise ValueError(
            f"{piece.name} is rows {', '.join(f'[{r.start}, {r.stop})' for r in piece.rows[:3])} of a weight whose blocks "
            f"are {part.height} rows high: a piece begins and ends with a block"
        )
    return _rows(part.tensor, [range(r.start // part.height, -(-r.stop // part.height)) for r in piece.rows])


def _rows(matrix: Tensor, rows: Sequence[range]) -> Tensor:
    parts = [matrix[r.start : r.stop] for r in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
