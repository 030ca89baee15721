"""Bounded reads of files that other programs wrote, on this host or in a store. Devices, FIFOs and
folders raise ValueError.

Symbolic links are followed, since shared storage often uses them. The check is of the file that
they point to.
"""

import os
import stat
from typing import IO

from zerocast.checkpoint.store import Location, StorePath

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
