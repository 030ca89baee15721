"""The recorder of `recorder.c`, compiled where it runs, and the log that it writes."""

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("recorder.c")


class Record(NamedTuple):
    """One call, in the order in which calls returned; `data` is what a write wrote."""

    what: str
    fields: tuple[str, ...]
    data: bytes = b""


@functools.cache
def why_not() -> str | None:
    """Why nothing can be recorded here; None where it can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return (
            f"system calls are trapped on Linux on x86_64 and aarch64, this is {sys.platform} on {platform.machine()}"
        )
    if _compiler() is None:
        return "there is no C compiler (cc, gcc or g++)"
    tried = f"import ctypes, sys; sys.exit(ctypes.CDLL({str(library())!r}).crash_begin(b'/nowhere', b'/dev/null'))"
    status = subprocess.run([sys.executable, "-c", tried], check=False).returncode
    return f"the kernel installs no seccomp filter: {os.strerror(status)}" if status else None


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


@functools.cache
def library() -> Path:
    compiler = _compiler()
    assert compiler is not None
    out = Path(tempfile.mkdtemp(prefix="recorder_"), "recorder.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", out, SOURCE], check=True)
    return out


class Recorder:
    """Records what this process does under `root`, from now to its end, into `log`."""

    def __init__(self, compiled: str, root: Path, log: Path) -> None:
        self._calls = ctypes.CDLL(compiled)
        status = self._calls.crash_begin(str(root).encode(), str(log).encode())
        if status:
            raise OSError(status, os.strerror(status))

    def mark(self, text: str) -> None:
        """Put a mark into the log."""
        self._calls.crash_mark(text.encode())

    def kill_before(self, change: int) -> None:
        """End this process by SIGKILL before its `change`-th change from now on, counted from 1; 0 never does."""
        self._calls.crash_arm(ctypes.c_long(change))


def read_log(log: Path) -> Iterator[Record]:
    """The records of a log."""
    content, at = log.read_bytes(), 0
    while at < len(content):
        end = content.index(b"\n", at)
        what, *fields = content[at:end].decode().split("\t")
        length = int(fields[3]) if what == "write" else 0
        at = end + 1 + length
        yield Record(what, tuple(fields), content[end + 1 : at])
