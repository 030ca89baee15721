"""Folders of torch.distributed.checkpoint, from any program and any number of ranks: SafeReader
reads them without running code from a file, DcpSource presents such a folder as a source of
tensors.

torch's own reader unpickles `.metadata` without limits. SafeReader builds only the classes of
checkpoint metadata, and opens only regular files of the folder, even if the metadata names other
paths. torch itself reads tensors with `weights_only`.

The metadata is checked before anything is read through it. If chunks left out a part of a tensor,
that part of a master would silently keep its old value. If they overlapped, the result would depend
on their order.
"""

import contextlib
import functools
import io
import itertools
import math
import os
import pickle
import pickletools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageReader

from zerocast.checkpoint.sources.source import Entry, TensorSource, slices_of
from zerocast.checkpoint.store import AnyPath, Location, StorePath, as_location, open_regular, read_bounded
from zerocast.checkpoint.torch_checkpoint import load
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats.element import dtype_name

# The largest metadata that is read; a chunk needs about 200 bytes.
MAX_BYTES = 2**31
# The number of dimensions in which a tensor may be split into chunks.
MAX_CUTS = 8

_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}


def _memory_format(encoding: Any, name: str) -> Any:
    """Return a memory format: replaces getattr, with which some releases of Python 3.11 pickle
    enumeration members.
    """
    if encoding is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"checkpoint metadata may not read {name!r} of {encoding!r}")
    return _MEM_FORMAT_ENCODING[name]


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the classes of checkpoint metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if name not in _METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"checkpoint metadata may not contain {module}.{name}")
        return super().find_class(module, name)


class _RegularFiles(FileSystem):
    """A FileSystem that opens regular files for reading and raises ValueError for anything else."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with open_regular(path) as stream:
            yield stream


class SafeReader(FileSystemReader):
    """A FileSystemReader whose metadata cannot run code. It reads the metadata once, so that all
    loads use what was checked.

    Raises pickle.UnpicklingError for metadata that would run code, ValueError for damaged metadata
    and for chunks that overlap or leave out a part of a tensor.
    """

    # Files of this host, or of a store.
    fs: Any

    def __init__(self, path: AnyPath) -> None:
        self._folder = as_location(path)
        super().__init__(str(self._folder))
        if isinstance(self._folder, StorePath):
            # It imports fsspec.
            from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as StoreFiles  # noqa: PLC0415

            self.fs = StoreFiles()
            self.fs.fs, self.path = self._folder.opened()
        else:
            self.fs = _RegularFiles()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata, which was checked; raises the errors of the class."""
        return self._metadata

    @functools.cached_property
    def _metadata(self) -> Metadata:
        file = self._folder / ".metadata"
        content = read_bounded(file, MAX_BYTES)
        try:
            _check_memo(content)
            metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        except pickle.UnpicklingError:
            raise
        except Exception as error:
            # A damaged pickle can raise any error.
            raise ValueError(f"{file} is damaged: {error!r}") from None
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"checkpoint metadata is a {type(metadata).__name__}")
        try:
            problem = next(_problems(metadata), None)
        except (AttributeError, TypeError, ValueError) as error:
            problem = repr(error)
        if problem:
            raise ValueError(f"{file} is damaged: {problem}")
        return metadata


class DcpSource(TensorSource):
    """The tensors of a checkpoint folder. Objects that are not tensors are skipped and never
    unpickled.

    A tensor may be stored in the files of several ranks, so `read` holds one full tensor in memory.
    Ranks that load together through `reader` do not. Raises pickle.UnpicklingError for metadata
    that would run code, ValueError for damaged metadata.
    """

    def __init__(self, path: Location) -> None:
        self.location = str(path)
        self._reader = SafeReader(path)
        self.entries = {
            name: Entry(tuple(tensor.size), dtype_name(tensor.properties.dtype))
            for name, tensor in self._reader.read_metadata().state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        # A cache of the tensor that was read last.
        self._load_cached = functools.lru_cache(maxsize=1)(self._load)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of a tensor. The full tensor stays in memory until another tensor is
        read.
        """
        return self._load_cached(name)[slices_of(offsets, sizes)]

    def reader(self) -> StorageReader:
        """Return the folder as storage that torch.distributed.checkpoint loads from."""
        return self._reader

    def _load(self, name: str) -> Tensor:
        entry = self.entries[name]
        state = {name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))}
        try:
            load(state, self._reader, ONE_PROCESS, self.location)
        except (pickle.UnpicklingError, RuntimeError, ValueError, AssertionError, OSError) as error:
            lines = str(error).strip().splitlines()
            reason = lines[-1] if lines else ""
            raise ValueError(f"{name} cannot be read from {self.location}: {reason}") from error
        return state[name]


def _check_memo(content: bytes) -> None:
    """Raise ValueError for a pickle that would allocate a memo with more entries than it has
    bytes.
    """
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in _PUTS and isinstance(argument, int) and argument > len(content):
            raise ValueError(f"its memo would have {argument:,} entries")


def _problems(metadata: Metadata) -> Iterator[str]:
    """Yield the problems of metadata. Attributes of wrong types may raise AttributeError, TypeError
    or ValueError.
    """
    stored = dict(metadata.storage_data or {})
    for location in stored.values():
        if not isinstance(location, _StorageInfo) or location.offset < 0 or location.length < 0:
            yield f"{location!r} is not a location in a file"
        elif PurePath(location.relative_path).name != location.relative_path:
            yield f"it points out of its folder: {location.relative_path!r}"
    entries: dict[Any, Any] = dict(metadata.state_dict_metadata)
    for name, entry in entries.items():
        if not isinstance(name, str):
            yield f"{name!r} is not a str"
        if isinstance(entry, TensorStorageMetadata):
            yield from _tensor_problems(name, entry, stored)


def _tensor_problems(name: str, entry: TensorStorageMetadata, stored: dict[MetadataIndex, Any]) -> Iterator[str]:
    if not isinstance(entry.properties.dtype, torch.dtype) or not _natural(entry.size):
        yield f"{name} has size {entry.size!r} and dtype {entry.properties.dtype!r}"
        return
    covered = 0
    for chunk in entry.chunks:
        if not _is_inside(chunk, entry.size):
            yield f"a chunk of {name} is not inside of it: {chunk!r}"
            return
        if MetadataIndex(name, chunk.offsets) not in stored:
            yield f"a chunk of {name} is in no file: {chunk!r}"
        covered += math.prod(chunk.sizes)
    if covered != math.prod(entry.size):
        yield f"the chunks of {name} hold {covered:,} elements of {math.prod(entry.size):,}"
        return
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    uneven = first_uneven(boxes, tuple(entry.size))
    if uneven:
        yield f"the chunks of {name} {uneven}"


def first_uneven(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], size: tuple[int, ...]) -> str | None:
    """Return the first element that the boxes do not cover exactly once, as text; None if the boxes
    are a partition.

    The number of boxes over an element is a step function that its mixed differences determine:
    each box adds +1 and -1 alternately at its corners. The boxes are a partition exactly if all
    corners cancel except those of the tensor itself. At the first corner in lexicographic order
    where they do not cancel, the difference is the number of boxes in excess at that element. The
    time is linear in the number of boxes and independent of the size of the tensor.
    """
    cut_axes = [axis for axis, extent in enumerate(size) if any(sizes[axis] != extent for _, sizes in boxes)]
    if len(cut_axes) > MAX_CUTS:
        return f"are split in {len(cut_axes)} dimensions, but at most {MAX_CUTS} are supported"
    differences: Counter[tuple[int, ...]] = Counter()
    whole_tensor = ((0,) * len(size), size)
    for (offsets, sizes), weight in [*((box, 1) for box in boxes), (whole_tensor, -1)]:
        if 0 in sizes:
            continue
        signed_ends = [((offsets[axis], 1), (offsets[axis] + sizes[axis], -1)) for axis in cut_axes]
        for ends in itertools.product(*signed_ends):
            corner = tuple(index for index, _ in ends)
            differences[corner] += math.prod((sign for _, sign in ends), start=weight)
    uneven = [(corner, count) for corner, count in differences.items() if count]
    if not uneven:
        return None
    corner, excess = min(uneven)
    element = [0] * len(size)
    for axis, index in zip(cut_axes, corner, strict=True):
        element[axis] = index
    return f"{'overlap' if excess > 0 else 'leave a gap'} at element {tuple(element)}"


def _is_inside(chunk: ChunkStorageMetadata, size: Sequence[int]) -> bool:
    if not (_natural(chunk.offsets) and _natural(chunk.sizes)) or len(chunk.offsets) != len(chunk.sizes):
        return False
    ends = [first + extent for first, extent in zip(chunk.offsets, chunk.sizes, strict=True)]
    return len(ends) == len(size) and all(end <= extent for end, extent in zip(ends, size, strict=True))


def _natural(numbers: Sequence[int]) -> bool:
    return all(isinstance(number, int) and number >= 0 for number in numbers)
