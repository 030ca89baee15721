"""ClearWriter: torch.distributed.checkpoint's writer of folders, whose files are on the disk once it is done.

torch syncs a file before it has flushed its buffer, so that the end of a file, or all of a small one,
is in memory only: this writer syncs what was closed.

It also fails with the disk's own words. torch.save answers a write that failed with "unexpected pos
704 vs 598"; that the disk is full is then only in the exception's context, which does not travel to
other ranks.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from zerocast.checkpoint.whole_folder import sync_file


class _SyncedFiles(FileSystem):
    """Files that are on the disk once they are closed, by the process that wrote them."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            yield stream
        if "w" in mode:
            sync_file(Path(path))


class ClearWriter(FileSystemWriter):
    """Brings files to the disk, and raises the OSError behind what torch made of it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=False)
        self.fs = _SyncedFiles()

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch."""
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            raise _first_os_error(error) from error


def _first_os_error(error: BaseException) -> BaseException:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return OSError(cause.errno, cause.strerror)
        cause = cause.__cause__ or cause.__context__
    return error


def reasons(error: CheckpointException) -> str:
    """What each rank that failed says, without tracebacks."""
    return "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in sorted(error.failures.items()))
