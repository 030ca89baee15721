"""Checkpoints of a ZeroAdamW on disk: torch.distributed.checkpoint, read without running what a file might carry.

The default reader unpickles `.metadata` freely and takes pickled objects in place of tensors; `load` takes neither. Any number of
ranks can load what any other number saved, and other tools read the files as plain tensors.
"""

import contextlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, TensorStorageMetadata

from zerocast.optim.zero_adamw import ZeroAdamW

Path = str | PathLike[str]

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
        return metadata


def save(optimizer: ZeroAdamW, path: Path, extra: Mapping[str, Tensor] | None = None) -> None:
    """Write the optimizer's state into the folder `path`, every rank its part; `extra` holds a few plain tensors of the caller.

    All ranks call it. Keys are those of `zerocast.optim.state`, and `extra.<name>`.
    """
    state = {**optimizer.state_dict(), "extra": dict(extra or {})}
    with _without_process_group_warning():
        state_dict_saver.save(state, checkpoint_id=path, process_group=optimizer.process_group)


def load(optimizer: ZeroAdamW, path: Path, extra: Mapping[str, Tensor] | None = None) -> None:
    """Read what `save` wrote, on any number of ranks, and make the weights from it; `extra` is filled in place.

    All ranks call it. Raises ValueError, with nothing changed, for a tensor that is missing or has another shape, and
    pickle.UnpicklingError for metadata that would run code; RuntimeError for files that break off or hold something else than
    tensors, and then the optimizer must load again before it goes on. State of delayed scaling that is missing is seeded anew.
    """
    reader = SafeReader(path)
    saved = reader.read_metadata().state_dict_metadata
    state = {**optimizer.state_dict(), "extra": dict(extra or {})}
    for name in [name for name in state["zerocast"] if _unfit(saved, f"zerocast.{name}", state["zerocast"][name])]:
        del state["zerocast"][name]
    problems = _unfit(saved, "", state)
    if problems:
        raise ValueError(f"{path} does not fit this optimizer: {'; '.join(problems[:4])}")
    try:
        with _without_process_group_warning():
            state_dict_loader.load(state, storage_reader=reader, process_group=optimizer.process_group)
    except CheckpointException as error:  # no Exception, and the same on every rank
        raise RuntimeError(
            f"{path} cannot be read to its end; masters are now partly what it holds: {error}"
        ) from error
    optimizer.load_state_dict(state)


def _unfit(saved: Mapping[str, Any], prefix: str, state: Mapping[str, Any]) -> list[str]:
    """What of `state` cannot be read from a checkpoint with this metadata."""
    problems = []
    for name, tensor in _leaves(prefix, state):
        found = saved.get(name)
        if not isinstance(found, TensorStorageMetadata):
            problems.append(f"{name} is no tensor there" if found else f"{name} is missing")
        elif found.size != tensor.shape:
            problems.append(f"{name} has shape {tuple(found.size)} there and {tuple(tensor.shape)} here")
    return problems


def _leaves(prefix: str, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            yield from _leaves(name, value)
        else:
            yield name, value


@contextlib.contextmanager
def _without_process_group_warning() -> Iterator[None]:
    """One process without a process group is an ordinary case here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
