"""SafeReader: torch.distributed.checkpoint's reader of folders, without the ability to run what a file carries.

The default reader unpickles `.metadata` freely. This one builds the classes of checkpoint metadata and nothing else, and opens no
file outside of the folder, whatever the metadata says. Tensors are read with `weights_only` by torch itself.
"""

import pickle
from pathlib import PurePath
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

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
    "torch": {"Size", "bfloat16", "float16", "float32", "float64", "int64", "uint8", "bool"},
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
    """A FileSystemReader whose metadata cannot run code. Raises pickle.UnpicklingError for metadata that tries."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata."""
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"checkpoint metadata is a {type(metadata).__name__}")
        for place in (metadata.storage_data or {}).values():
            if PurePath(place.relative_path).name != place.relative_path:
                raise pickle.UnpicklingError(f"checkpoint metadata points out of its folder: {place.relative_path!r}")
        return metadata
