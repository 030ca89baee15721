"""stored_weights: the tensors of a folder of save_pretrained under the names and shapes of the
parameters of a model.

transformers stores experts separately, but a model has them in one parameter. `load_masters` reads
from this source only the elements that a rank owns.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.checkpoint.sources import Entry, TensorSource, open_source
from zerocast.serve.piece import Piece
from zerocast.serve.stored_model import StoredModel


def stored_weights(model: Any, source: str | os.PathLike[str] | Mapping[str, Any]) -> TensorSource:
    """Return the weights of a transformers `model` in a folder or file that `save_pretrained`
    wrote, for `zerocast.optim.load_masters` and `zerocast.fsdp2.load_masters`.

    Raises like them for a source that cannot be opened, TypeError for another model.
    """
    return StoredWeights(StoredModel.from_model(model), open_source(source))


class StoredWeights(TensorSource):
    """A TensorSource that joins stored pieces to parameters."""

    def __init__(self, model: StoredModel, source: TensorSource) -> None:
        self.location = source.location
        self._source = source
        # The pieces of each parameter that is not stored under its own name.
        self._pieces = {
            name: pieces
            for name, pieces in model.pieces.items()
            if [piece.name for piece in pieces] != [name] and all(piece.name in source.entries for piece in pieces)
        }
        piece_names = {piece.name for pieces in self._pieces.values() for piece in pieces}
        self.entries = {name: entry for name, entry in source.entries.items() if name not in piece_names}
        for name, pieces in self._pieces.items():
            self.entries[name] = Entry(model.shapes[name], source.entries[pieces[0].name].dtype)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of a tensor, on the CPU, in its stored dtype."""
        if name not in self._pieces:
            return self._source.read(name, offsets, sizes)
        shape = self.entries[name].shape
        first_column = offsets[-1]
        columns = sizes[-1]
        parts = []
        for rows in _rows(shape[:-1], offsets[:-1], sizes[:-1]):
            for piece, first_row, count in _stored_rows(self._pieces[name], rows):
                parts.append(self._source.read(piece, (first_row, first_column), (count, columns)))
        return torch.cat([torch.empty(0, columns, dtype=parts[0].dtype), *parts]).view(*sizes)


def _rows(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[range]:
    """Yield the rows of a box, as ranges of the rows of a matrix `[prod(shape), last]`."""
    if len(shape) == 1:
        yield range(offsets[0], offsets[0] + sizes[0])
        return
    below = torch.Size(shape[1:]).numel()
    for index in range(offsets[0], offsets[0] + sizes[0]):
        for inner in _rows(shape[1:], offsets[1:], sizes[1:]):
            yield range(index * below + inner.start, index * below + inner.stop)


def _stored_rows(pieces: Sequence[Piece], wanted: range) -> Iterator[tuple[str, int, int]]:
    """Yield (stored name, first row in it, number of rows) of the wanted rows, in their order."""
    overlaps = []
    for piece in pieces:
        before = 0
        for rows in piece.rows:
            first, last = max(rows.start, wanted.start), min(rows.stop, wanted.stop)
            if first < last:
                overlaps.append((first, piece.name, before + first - rows.start, last - first))
            before += len(rows)
    yield from ((name, row, count) for _, name, row, count in sorted(overlaps))
