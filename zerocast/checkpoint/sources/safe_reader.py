"""SafeReader: torch.distributed.checkpoint's folder reader, unable to run code from a file.

The default reader unpickles `.metadata` freely. This one builds only the classes of checkpoint
metadata, and opens only regular files of the folder, whatever the metadata says. torch itself reads
tensors with `weights_only`.

The metadata is checked before anything is read through it. If chunks left out a part of a tensor,
that part of a master would silently keep its old value; if they overlapped, the result would depend
on their order.
"""

import contextlib
import io
import itertools
import math
import os
import pickle
import pickletools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from zerocast.checkpoint.regular_file import open_regular, read_bounded

MOST_BYTES = 2**31  # of metadata, which has some 200 bytes a chunk
MOST_CUTS = 8  # dimensions that a tensor may be cut in

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
    """Replaces getattr, with which some releases of Python 3.11 pickle enumeration members."""
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
    """A FileSystemReader whose metadata cannot run code.

    Raises pickle.UnpicklingError for metadata that would run code, ValueError for damaged metadata
    and for chunks that overlap or leave out a part of a tensor.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.fs = _RegularFiles()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read and check the checkpoint's metadata; raises as the class says."""
        place = Path(self.path, ".metadata")
        content = read_bounded(place, MOST_BYTES)
        try:
            _check_memo(content)
            metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        except pickle.UnpicklingError:
            raise
        except Exception as error:  # a damaged pickle can raise any error
            raise ValueError(f"{place} is damaged: {error!r}") from None
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"checkpoint metadata is a {type(metadata).__name__}")
        try:
            problem = next(_problems(metadata), None)
        except (AttributeError, TypeError, ValueError) as error:
            problem = repr(error)
        if problem:
            raise ValueError(f"{place} is damaged: {problem}")
        return metadata


def _check_memo(content: bytes) -> None:
    """Raise ValueError for a pickle that would allocate a memo of more entries than it has
    bytes.
    """
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in _PUTS and isinstance(argument, int) and argument > len(content):
            raise ValueError(f"it would remember {argument:,} objects")


def _problems(metadata: Metadata) -> Iterator[str]:
    """The problems of metadata; attributes of wrong types may raise AttributeError, TypeError,
    ValueError.
    """
    stored = dict(metadata.storage_data or {})
    for place in stored.values():
        if not isinstance(place, _StorageInfo) or place.offset < 0 or place.length < 0:
            yield f"{place!r} is no place in a file"
        elif PurePath(place.relative_path).name != place.relative_path:
            yield f"it points out of its folder: {place.relative_path!r}"
    tensors: dict[Any, Any] = dict(metadata.state_dict_metadata)
    for name, found in tensors.items():
        if not isinstance(name, str):
            yield f"{name!r} is no name"
        if isinstance(found, TensorStorageMetadata):
            yield from _tensor_problems(name, found, stored)


def _tensor_problems(name: str, found: TensorStorageMetadata, stored: dict[MetadataIndex, Any]) -> Iterator[str]:
    if not isinstance(found.properties.dtype, torch.dtype) or not _natural(found.size):
        yield f"{name} has size {found.size!r} and dtype {found.properties.dtype!r}"
        return
    covered = 0
    for chunk in found.chunks:
        if not _is_inside(chunk, found.size):
            yield f"a chunk of {name} is not inside of it: {chunk!r}"
            return
        if MetadataIndex(name, chunk.offsets) not in stored:
            yield f"a chunk of {name} is in no file: {chunk!r}"
        covered += math.prod(chunk.sizes)
    if covered != math.prod(found.size):
        yield f"the chunks of {name} hold {covered:,} elements of {math.prod(found.size):,}"
        return
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks]
    uneven = first_uneven(boxes, tuple(found.size))
    if uneven:
        yield f"the chunks of {name} {uneven}"


def first_uneven(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], size: tuple[int, ...]) -> str | None:
    """The first element that the boxes do not cover exactly once, as text; None for a partition.

    The number of boxes over an element is a step function that its mixed differences determine:
    each box adds +1 and -1 alternately at its corners. The boxes are a partition exactly if all
    corners cancel except those of the tensor itself. At the first corner in lexicographic order
    where they do not cancel, the difference is the number of boxes in excess at that element. The
    time is linear in the number of boxes and independent of the size of the tensor.
    """
    cut = [axis for axis, whole in enumerate(size) if any(sizes[axis] != whole for _, sizes in boxes)]
    if len(cut) > MOST_CUTS:
        return f"are cut in {len(cut)} dimensions, and {MOST_CUTS} is the most"
    corners: Counter[tuple[int, ...]] = Counter()
    whole = ((0,) * len(size), size)
    for (offsets, sizes), weight in [*((box, 1) for box in boxes), (whole, -1)]:
        if 0 in sizes:
            continue
        ends = [((offsets[axis], 1), (offsets[axis] + sizes[axis], -1)) for axis in cut]
        for corner in itertools.product(*ends):
            corners[tuple(at for at, _ in corner)] += math.prod((sign for _, sign in corner), start=weight)
    point, excess = min(((corner, count) for corner, count in corners.items() if count), default=(None, 0))
    if point is None:
        return None
    at = [0] * len(size)
    for axis, index in zip(cut, point, strict=True):
        at[axis] = index
    return f"{'overlap' if excess > 0 else 'leave a gap'} at element {tuple(at)}"


def _is_inside(chunk: ChunkStorageMetadata, size: Sequence[int]) -> bool:
    if not (_natural(chunk.offsets) and _natural(chunk.sizes)) or len(chunk.offsets) != len(chunk.sizes):
        return False
    ends = [first + extent for first, extent in zip(chunk.offsets, chunk.sizes, strict=True)]
    return len(ends) == len(size) and all(end <= whole for end, whole in zip(ends, size, strict=True))


def _natural(numbers: Sequence[int]) -> bool:
    return all(isinstance(number, int) and number >= 0 for number in numbers)
