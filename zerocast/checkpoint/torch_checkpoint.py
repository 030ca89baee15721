"""Calls of torch.distributed.checkpoint, with four differences: files are synced to disk, and
hashed while they are written, errors of the operating system keep their text, and a single process
gets no warning.
"""

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageReader

from zerocast.checkpoint.manifest import FileSum
from zerocast.checkpoint.store import Location, StorePath
from zerocast.checkpoint.whole_folder import sync
from zerocast.distributed.group import Group


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
            from zerocast.checkpoint.store_files import HashedStoreFiles  # noqa: PLC0415

            self.fs = HashedStoreFiles()
        else:
            self.fs = _SyncedFiles()
        self.path = self.fs.init_path(str(folder))

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
