"""TensorSource: named tensors that are somewhere else, as shapes and dtypes first and as values piece by piece.

A safetensors file, a plain state dict and a folder of torch.distributed.checkpoint are sources; none of them runs what a file
carries. SourceReader lets torch.distributed.checkpoint load from any of them, each rank only the boxes that it needs.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

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


class SourceReader(StorageReader):
    """Reads the high-precision tensors of a source."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """There is one source."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Each tensor is one chunk."""
        entries = self._source.entries.items()
        tensors: dict[str, Any] = {name: _metadata(entry) for name, entry in entries if entry.dtype in HIGH_PRECISION}
        return Metadata(tensors, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Box after box."""
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._source.read(item.storage_index.fqn, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """It is not made from a path."""
        return False


def _metadata(entry: Entry) -> TensorStorageMetadata:
    size = torch.Size(entry.shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(getattr(torch, entry.dtype)), size, [whole])
