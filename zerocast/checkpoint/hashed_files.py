"""HashedFiles: files of torch.distributed.checkpoint are hashed while they are written."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase

from zerocast.checkpoint.manifest import FileSum


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
