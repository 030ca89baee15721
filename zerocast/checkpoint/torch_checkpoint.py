"""Calls of torch.distributed.checkpoint, and TensorShard, which presents a flat shard of a tensor
to it.

The calls have four differences: files are synced to disk, and hashed while they are written, errors
of the operating system keep their text, and a single process gets no warning.

Any flat span of a matrix consists of at most three boxes. Each box is a view of the flat shard, so
that a save copies nothing and a load writes in place, for any number of ranks that saved.
"""

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader

from zerocast.checkpoint.manifest import FileSum
from zerocast.checkpoint.store import Location, StorePath
from zerocast.checkpoint.whole_folder import sync
from zerocast.distributed.group import Group
from zerocast.formats.layout import Span

# Methods that torch.distributed.checkpoint calls before it uses the protocol below.
_ASKED = {"size", "dim", "numel", "nelement", "stride", "storage_offset", "data_ptr", "untyped_storage", "element_size"}
# Methods that torch's DefaultStager calls. It also copies the attributes `flat` and `chunks`.
_STAGED = {"new_empty", "set_"}


class TensorShard(Tensor):
    """One rank's elements of a tensor that is sharded over ranks.

    Implements the protocol of torch.distributed._checkpointable. The tensor itself is a placeholder
    without memory that has the shape and dtype of the full tensor. Computing with it raises
    TypeError.

    Attributes:
        flat: the elements of this rank, one-dimensional.
        span: their range in the flattened full tensor.
        chunks: views of `flat` as boxes, by their offsets in the full tensor.
    """

    flat: Tensor
    span: Span
    chunks: dict[torch.Size, Tensor]

    @staticmethod
    def from_flat(flat: Tensor, span: Span, shape: Sequence[int]) -> "TensorShard":
        """Return the shard of a tensor of `shape`; `flat` is contiguous and has `span.numel`
        elements.
        """
        shard: TensorShard = Tensor._make_subclass(TensorShard, flat.new_empty(()).expand(tuple(shape)))
        shard.flat = flat
        shard.span = span
        shard.chunks = {}
        start = 0
        for offsets, sizes in span.boxes(shape):
            numel = torch.Size(sizes).numel()
            shard.chunks[torch.Size(offsets)] = flat[start : start + numel].view(sizes)
            start += numel
        return shard

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return the boxes that this rank writes, for torch.distributed.checkpoint."""
        properties = TensorProperties.create_from_tensor(self.flat)
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(offsets, box.size()), properties, self.size()),
            )
            for offsets, box in self.chunks.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes that this rank reads, for torch.distributed.checkpoint."""
        return [ChunkStorageMetadata(offsets, box.size()) for offsets, box in self.chunks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the view of the flat shard that holds a box."""
        assert index.offset is not None
        return self.chunks[index.offset]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Return the shape, span and dtype, without the elements."""
        return f"TensorShard(shape={tuple(self.shape)}, span=[{self.span.start}, {self.span.stop}), dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise TypeError for every function that would read the placeholder."""
        name = getattr(func, "__name__", "")
        if name in _ASKED or name in _STAGED or name == "__get__" or name.startswith("is_"):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise TypeError(f"{name} of a TensorShard: its elements are on several ranks; this rank's are in `flat`")

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorShard":
        """Return a shard with its own elements, which a step does not change."""
        return TensorShard.from_flat(self.flat.clone(), self.span, self.shape)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise TypeError: one rank's shard is not a checkpoint."""
        raise TypeError("the state of several ranks is saved with torch.distributed.checkpoint, not with torch.save")


def save(state: Mapping[str, Any], folder: Location, group: Group, planner: SavePlanner | None) -> dict[str, FileSum]:
    """Write this rank's part of a state dictionary into a folder. Returns the sums of the files
    that this rank has written, keyed by name. Raises CheckpointException on every rank if any rank
    cannot write.
    """
    writer = ClearWriter(folder)
    with _without_process_group_warning():
        state_dict_saver.save(
            dict(state),
            storage_writer=writer,
            planner=planner,
            process_group=group.handle,
            no_dist=group.handle is None,
        )
    sums: dict[str, FileSum] = writer.fs.sums
    return sums


def load(state: dict[str, Any], reader: StorageReader, group: Group, location: str, consequence: str = "") -> None:
    """Fill the tensors of a state dictionary in place. Raises RuntimeError on every rank if any
    rank cannot read; its text names the `location` and ends with the `consequence` for the tensors.
    """
    try:
        with _without_process_group_warning():
            state_dict_loader.load(
                state, storage_reader=reader, process_group=group.handle, no_dist=group.handle is None
            )
    except CheckpointException as error:
        # This error is not an Exception, and it is the same on every rank.
        raise RuntimeError(f"{location} cannot be read to its end{consequence}: {reasons(error)}") from error


def load_masters(state: dict[str, Any], reader: StorageReader, group: Group, location: str) -> None:
    """Call `load` for tensors that include masters. The error states that they are partly
    written.
    """
    load(state, reader, group, location, "; masters are now partly overwritten")


def reasons(error: CheckpointException) -> str:
    """Return the error of each rank that failed, as one text without tracebacks."""
    return "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in sorted(error.failures.items()))


@contextlib.contextmanager
def _without_process_group_warning() -> Iterator[None]:
    """Silence torch's warning that there is no process group, which is a normal case here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


class HashedFiles(FileSystemBase):
    """Mixed into a file system of torch: each file is hashed while it is written.

    Attributes:
        sums: size and hash of each file that was written, keyed by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, FileSum] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file for writing."""
        with super().create_stream(path, mode) as stream:  # type: ignore[safe-super]
            hashed = _HashedStream(stream)
            yield hashed
        self.sums[PurePath(path).name] = hashed.sum()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file, and keep its checksum under the new name."""
        super().rename(path, new_path)  # type: ignore[safe-super]
        self.sums[PurePath(new_path).name] = self.sums.pop(PurePath(path).name)


class _HashedStream:
    """A stream that hashes what is written to it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self._nbytes = 0

    def write(self, content: Any) -> int:
        self._digest.update(content)
        self._nbytes += memoryview(content).nbytes
        return int(self._stream.write(content))

    def __getattr__(self, name: str) -> Any:
        """Return the other methods of the stream, of which torch calls flush, tell and close."""
        return getattr(self._stream, name)

    def sum(self) -> FileSum:
        """Return the size and hash of the written bytes."""
        return FileSum(self._nbytes, self._digest.hexdigest())


class _SyncedFiles(HashedFiles, FileSystem):
    """A FileSystem whose files are synced when they are closed."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            yield stream
        sync(Path(path))


class ClearWriter(FileSystemWriter):
    """torch's FileSystemWriter, with hashed and synced files and the operating system's errors.

    torch syncs a file before it flushes its buffer, so the end of a file, or all of a small file,
    is still in memory. This writer syncs each file after closing it. When a write fails, torch.save
    reports "unexpected pos 704 vs 598". The OSError, such as a full disk, is only in the context of
    that exception, which is not sent to other ranks. This writer raises the OSError.
    """

    # The file system, local or of a store, which hashes files.
    fs: Any

    def __init__(self, folder: Location) -> None:
        super().__init__(str(folder), sync_files=False)
        if isinstance(folder, StorePath):
            # It imports fsspec.
            from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as StoreFiles  # noqa: PLC0415

            self.fs = type("HashedStoreFiles", (HashedFiles, StoreFiles), {})()
            self.fs.fs, self.path = folder.opened()
        else:
            self.fs = _SyncedFiles()

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Write this rank's tensors; raises the first OSError behind a failure."""
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            raise _first_os_error(error) from error


def _first_os_error(error: BaseException) -> BaseException:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return OSError(cause.errno, cause.strerror) if cause.errno else OSError(str(cause))
        cause = cause.__cause__ or cause.__context__
    return error
