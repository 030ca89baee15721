"""TensorSource: named tensors that are somewhere else, as shapes and dtypes first and as values piece by piece.

Whatever can be read in place of a checkpoint of ours is one: a safetensors file, a plain state dict, a folder of
torch.distributed.checkpoint. None of them runs what a file carries.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.storage import StorageReader

from zerocast.formats.layout import Span

HIGH_PRECISION = ("float32", "bfloat16", "float16")  # what an FP32 master can take without rounding
PIECE = 2**20  # elements


@dataclass(frozen=True)
class Entry:
    """Shape of a tensor, and its dtype by torch's name, or by that of the file where torch has none."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class TensorSource(Protocol):
    """Tensors by name. Constructing one reads names and shapes, and raises ValueError for a file that is damaged."""

    place: str  # for messages

    @property
    def entries(self) -> Mapping[str, Entry]:
        """What there is."""
        ...

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The box of a tensor, on the CPU, in the dtype that it is stored in. ValueError for damage that shows only now."""
        ...

    def reader(self) -> StorageReader:
        """The same for torch.distributed.checkpoint."""
        ...


def read_span(source: TensorSource, name: str, span: Span) -> Tensor:
    """Elements of the row-major tensor, f32, flat."""
    shape = source.entries[name].shape
    parts = [source.read(name, *box).reshape(-1).float() for box in span.boxes(shape)]
    return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0), *parts])


def pieces(rows: int, columns: int, multiple: int) -> Iterator[Span]:
    """Consecutive spans of whole rows of a matrix, `multiple` rows or a multiple of it each, of about PIECE elements."""
    step = max(1, PIECE // (multiple * max(1, columns))) * multiple
    for first in range(0, rows, step):
        yield Span(first * columns, min(first + step, rows) * columns)


def dtype_name(dtype: torch.dtype) -> str:
    """As in `torch.<name>`."""
    return str(dtype).removeprefix("torch.")
