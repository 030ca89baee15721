"""SafeReader: torch.distributed.checkpoint's reader of folders, without the ability to run what a file carries.

The default reader unpickles `.metadata` freely. This one builds the classes of checkpoint metadata and nothing else, and opens no
file outside of the folder, whatever the metadata says. Tensors are read with `weights_only` by torch itself.

It also looks at what metadata says before anything is read by it: where chunks leave out a part of a tensor, that part of a master
would otherwise stay what it was, without a word.
"""

import math
import pickle
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

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


def _memory_format(encoding: Any, name: str) -> Any:
    """What stands in for getattr, by which some releases of Python 3.11 pickle members of an enumeration."""
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


class SafeReader(FileSystemReader):
    """A FileSystemReader whose metadata cannot run code.

    Raises pickle.UnpicklingError for metadata that tries, ValueError for metadata that is damaged or leaves parts of a tensor out.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata."""
        place = self.fs.concat_path(self.path, ".metadata")
        with self.fs.create_stream(place, "rb") as stream:
            try:
                metadata = _MetadataUnpickler(stream).load()
            except pickle.UnpicklingError:
                raise
            except Exception as error:  # a damaged pickle raises whatever its bytes happen to mean
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


def _problems(metadata: Metadata) -> Iterator[str]:
    """What is wrong with it; AttributeError, TypeError or ValueError for what has other types than metadata has."""
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


def _is_inside(chunk: ChunkStorageMetadata, size: Sequence[int]) -> bool:
    if not (_natural(chunk.offsets) and _natural(chunk.sizes)) or len(chunk.offsets) != len(chunk.sizes):
        return False
    ends = [first + extent for first, extent in zip(chunk.offsets, chunk.sizes, strict=True)]
    return len(ends) == len(size) and all(end <= whole for end, whole in zip(ends, size, strict=True))


def _natural(numbers: Sequence[int]) -> bool:
    return all(isinstance(number, int) and number >= 0 for number in numbers)
