"""TensorSource: named tensors in storage. Their shapes are known immediately, their values are read
box by box.

A safetensors file, a plain state dict and a folder of torch.distributed.checkpoint are sources;
none of them runs code from a file. SourceReader lets torch.distributed.checkpoint load from any of
them, so that each rank reads only the boxes that it needs.
"""

import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
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

from zerocast.checkpoint.store import check_regular
from zerocast.formats.element import dtype_name
from zerocast.formats.layout import Span

# The dtypes whose values FP32 holds exactly.
HIGH_PRECISION = ("float32", "bfloat16", "float16")
# The number of elements of a piece (`pieces`).
PIECE = 2**20
# The levels of nested dictionaries that are read.
DEEPEST = 16


@dataclass(frozen=True)
class Entry:
    """Shape of a tensor and the name of its dtype in torch, or in the file if torch lacks it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class TensorSource(Protocol):
    """Tensors by name; the constructor reads names and shapes and raises ValueError for damage.

    Attributes:
        location: the path of the source, for messages.
        entries: shape and dtype of each tensor keyed by name.
    """

    location: str
    entries: Mapping[str, Entry]

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of a tensor, on the CPU, in its stored dtype. Raises ValueError if reading
        shows that the source is damaged.
        """
        ...

    def reader(self) -> StorageReader:
        """Return the source as storage that torch.distributed.checkpoint loads from."""
        return SourceReader(self)


def slices_of(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a box."""
    return tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))


def read_span(source: TensorSource, name: str, span: Span) -> Tensor:
    """Return the elements `span` of a row-major tensor, one-dimensional, as f32."""
    shape = source.entries[name].shape
    boxes = [source.read(name, *box).reshape(-1).float() for box in span.boxes(shape)]
    if len(boxes) == 1:
        return boxes[0]
    # torch.cat does not accept an empty list, and an empty span has no boxes.
    return torch.cat([torch.empty(0, dtype=torch.float32), *boxes])


def pieces(rows: int, columns: int, multiple: int) -> Iterator[Span]:
    """Split a matrix into spans of about PIECE elements, each of full rows in multiples of
    `multiple`.
    """
    step = max(1, PIECE // (multiple * max(1, columns))) * multiple
    for first in range(0, rows, step):
        yield Span(first * columns, min(first + step, rows) * columns)


class SourceReader(StorageReader):
    """A storage reader over the high-precision tensors of a source."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the reader has one fixed source."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, in which each tensor is one chunk."""
        entries = self._source.entries.items()
        tensors: dict[str, Any] = {name: _metadata(entry) for name, entry in entries if entry.dtype in HIGH_PRECISION}
        return Metadata(tensors, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the source is open already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan of this rank unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of all ranks unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy each box of the plan into its tensor."""
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._source.read(item.storage_index.fqn, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: this reader does not open a source by its path."""
        return False


def _metadata(entry: Entry) -> TensorStorageMetadata:
    size = torch.Size(entry.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(getattr(torch, entry.dtype)), size, [chunk])


class StateDictSource(TensorSource):
    """Tensors of a mapping from names to tensors, in memory or in a file of torch.save.

    Files are read with `weights_only`, which builds nothing but tensors and containers, and are
    mapped if torch can map them. Nested dictionaries are flattened with names joined by dots;
    values that are not tensors are skipped.
    """

    def __init__(self, state: Mapping[str, Any], location: str = "the state dict") -> None:
        self.location = location
        try:
            self._tensors = dict(_tensors(state, "", DEEPEST))
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from None
        self.entries = {name: Entry(tuple(tensor.shape), _kind(tensor)) for name, tensor in self._tensors.items()}

    @staticmethod
    def of_file(path: Path) -> "StateDictSource":
        """Open a file of torch.save. Raises ValueError if it is damaged or has more than plain
        tensors.
        """
        check_regular(path)
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except FileNotFoundError:
            raise
        except Exception as error:
            # torch raises many kinds of errors for a damaged file. Only the first sentence is kept:
            # after it torch advises to load with weights_only=False, which runs code of the file.
            first_line = next(iter(str(error).strip().splitlines()), "")
            reason = first_line.partition(". In PyTorch")[0]
            raise ValueError(f"{path} is not a file of plain tensors: {type(error).__name__}: {reason}") from None
        if not isinstance(state, Mapping):
            raise ValueError(f"{path} holds a {type(state).__name__}, expected a state dict")
        return StateDictSource(state, str(path))

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of a tensor: a view, or a copy from its device."""
        return self._tensors[name].detach()[slices_of(offsets, sizes)].cpu()


def _tensors(state: Mapping[Any, Any], prefix: str, levels: int) -> Iterator[tuple[str, Tensor]]:
    if not levels:
        raise ValueError(f"dictionaries are nested more than {DEEPEST} deep")
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{key}.", levels - 1)


def _kind(tensor: Tensor) -> str:
    """Return the name of the dtype, or a name for the kind of tensor if its elements cannot be
    read.
    """
    if type(tensor) not in (Tensor, nn.Parameter):
        return type(tensor).__name__
    if tensor.is_meta or tensor.layout is not torch.strided:
        return "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
    return dtype_name(tensor.dtype)
