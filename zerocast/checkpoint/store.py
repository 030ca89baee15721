"""Locations of files: a local path, or a StorePath, a file or folder of a store that fsspec opens
by a URL, such as s3://bucket/run.

A store is used with the operations that all of them have: read and write a complete file, list a
folder, delete a file. It has no atomic rename, no fsync and no exclusive creation.

Files that other programs wrote are read within a bound. Devices, FIFOs and folders in their place
raise ValueError. Symbolic links are followed, since shared storage often uses them, and the check
is of the file that they point to.
"""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

# Protocols of the local file system, whose URLs are paths.
_LOCAL = ("file", "local")
# A URL that went through a Path, which leaves one slash of two.
_ONE_SLASH = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)")


@dataclass(frozen=True)
class StorePath:
    """A path of a store. It has the methods of `pathlib.Path` that checkpoints and exports need.

    Attributes:
        url: the URL, without a slash at its end.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "StorePath":
        return StorePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "StorePath":
        """The folder that the path is in."""
        return StorePath(self.url.rpartition("/")[0])

    def with_name(self, name: str) -> "StorePath":
        """Return the path of another name in the same folder."""
        return self.parent / name

    def absolute(self) -> "StorePath":
        """Return itself: a URL depends on no working folder."""
        return self

    resolve = absolute

    def exists(self) -> bool:
        """Return True if there is a file or a folder."""
        fs, path = self.opened()
        return bool(fs.exists(path))

    def is_file(self) -> bool:
        """Return True if there is a file."""
        fs, path = self.opened()
        return bool(fs.isfile(path))

    def is_dir(self) -> bool:
        """Return True if there is a folder. Some stores have no empty folders."""
        fs, path = self.opened()
        return bool(fs.isdir(path))

    def is_symlink(self) -> bool:
        """Return False: a store has no links."""
        return False

    def iterdir(self) -> Iterator["StorePath"]:
        """Yield the files and folders in this folder; none if it does not exist."""
        return (self / name for name in self._listed())

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file in this folder, keyed by name."""
        return {name: int(entry["size"]) for name, entry in self._listed().items() if entry["type"] == "file"}

    def open(self) -> IO[bytes]:
        """Open the file for reading. Raises FileNotFoundError if it does not exist."""
        fs, path = self.opened()
        try:
            stream: IO[bytes] = fs.open(path, "rb")
        except FileNotFoundError:
            raise FileNotFoundError(f"{self} does not exist") from None
        return stream

    def write_text(self, text: str) -> None:
        """Write a complete file, and make its folder if the store has folders."""
        self.write_bytes(text.encode())

    def write_bytes(self, content: bytes) -> None:
        """Write a complete file like `write_text`."""
        fs, path = self.opened()
        fs.makedirs(self.parent.opened()[1], exist_ok=True)
        fs.pipe_file(path, content)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the file, which has to exist unless `missing_ok`."""
        fs, path = self.opened()
        try:
            fs.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmtree(self, last: str) -> None:
        """Delete the folder and all that is in it, the file called `last` after all others."""
        fs, path = self.opened()
        others = [f"{path}/{name}" for name in self._listed() if name != last]
        if others:
            fs.rm(others, recursive=True)
        if fs.exists(path):
            fs.rm(path, recursive=True)

    def _listed(self) -> dict[str, dict[str, Any]]:
        fs, path = self.opened()
        try:
            entries = fs.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        # Some stores list a folder as a part of itself.
        inside = [entry for entry in entries if entry["name"].strip("/") != path.strip("/")]
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in inside}

    def opened(self) -> tuple[Any, str]:
        """Return fsspec's file system and the path in it. Its cache of folders is dropped, since
        other processes may have changed them.
        """
        from fsspec.core import url_to_fs  # noqa: PLC0415

        fs, path = url_to_fs(self.url)
        fs.invalidate_cache()
        return fs, str(path)


Location = Path | StorePath
AnyPath = str | os.PathLike[str] | StorePath


def as_location(path: AnyPath) -> Location:
    """Return the path of a local file or folder, or the StorePath of a URL. `file://` URLs are
    local.

    Raises ValueError for an unknown protocol, for a chain of URLs and for a URL in a Path;
    ModuleNotFoundError without fsspec, ImportError without its package for the protocol.
    """
    if isinstance(path, StorePath):
        return path
    text = os.fspath(path)
    if "://" not in text:
        _check_slashes(text)
        return Path(text)
    if "::" in text:
        raise ValueError(f"{text} is a chain of URLs: pass a single URL of a store that can be written")
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{text} is a URL, which fsspec opens: pip install fsspec") from error
    _, local_path = url_to_fs(text)
    return Path(local_path) if text.partition("://")[0] in _LOCAL else StorePath(text.rstrip("/"))


def local_path(path: AnyPath, remedy: str) -> Path:
    """Return the path, which must be local. Raises ValueError for a URL, with the remedy at the
    end.
    """
    location = as_location(path)
    if isinstance(location, StorePath):
        raise ValueError(f"{path} is a URL, expected a local path: {remedy}")
    return location


def _check_slashes(text: str) -> None:
    """Raise ValueError for a URL that has lost a slash in a Path: it would be a local folder
    `s3:`.
    """
    match = _ONE_SLASH.match(text)
    if match is None:
        return
    try:
        from fsspec import available_protocols  # noqa: PLC0415
    except ModuleNotFoundError:
        return
    if match[1] in available_protocols():
        raise ValueError(f"{text} was a URL before it became a Path, which drops a slash: pass it as a str")


KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str | os.PathLike[str] | StorePath) -> IO[bytes]:
    """Open a regular file for reading without ever blocking. Raises ValueError for any other kind
    of file.
    """
    if isinstance(path, StorePath):
        return path.open()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        # A socket, or a device without a driver, cannot be opened at all.
        check_regular(path)
        raise
    try:
        _check(path, os.fstat(descriptor))
    except ValueError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if the path exists and is not a regular file; for readers that open it
    themselves.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return
    _check(path, status)


def size_of(path: Location, stream: IO[bytes]) -> int:
    """Return the size in bytes of the file at a path, which was opened just now."""
    if not isinstance(path, StorePath):
        return os.fstat(stream.fileno()).st_size
    nbytes = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    return nbytes


def read_bounded(path: Location, most: int) -> bytes:
    """Return the bytes of a regular file. Raises ValueError if it has more than `most`."""
    with open_regular(path) as stream:
        nbytes = size_of(path, stream)
        content = stream.read(most + 1) if nbytes <= most else b""
    if max(nbytes, len(content)) > most:
        raise ValueError(
            f"{path} has {max(nbytes, len(content)):,} bytes, but at most {most:,} are read of such a file"
        )
    return content


def _check(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(
            f"{os.fspath(path)} is {KINDS.get(stat.S_IFMT(status.st_mode), 'not a regular file')}, expected a file"
        )
