"""Writer: which process writes a folder. WriterLease: a folder has one living writer.

The lease is a file in a folder of checkpoints. Its writer touches it every few seconds for as long
as it lives. A second writer finds the file and watches it: if it is touched, the first one lives,
and the second gets an error. A writer of this host whose process has ended is dead at once. One of
another host, or of a container with processes of its own, is dead once the file has been silent for
a while; no two clocks are compared, except those by which a file system dates two of its files.

A lock of the file system (flock) was left out: several network file systems have none.
"""

import contextlib
import functools
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerocast.checkpoint.regular_file import open_regular, read_bounded

LEASE = ".writer.json"
BEAT = 2.0  # seconds between two touches of a lease
WATCHED = 5.0  # seconds that a lease is watched at least, before its writer counts as dead
SILENCE = 15.0  # seconds without a touch after which a writer counts as dead
MOST_BYTES = 2**12  # of a lease


@dataclass(frozen=True)
class Writer:
    """A process: where it runs, and when it started, since numbers of processes are used again."""

    host: str
    boot: str  # of the host; differs after a restart, is the same in all containers of a host
    namespace: str  # of the number: a container has its own
    pid: int
    started: str  # in ticks since the boot

    @staticmethod
    def this_process() -> "Writer":
        """The process that calls this."""
        return _process(os.getpid())

    @staticmethod
    def of_content(content: Any) -> "Writer | None":
        """What `dataclasses.asdict` gave, as JSON; None for anything else."""
        try:
            return Writer(**content) if isinstance(content["pid"], int) else None
        except (KeyError, TypeError):
            return None

    def has_ended(self) -> bool:
        """True if the process provably runs no more; False for one that is out of sight here."""
        here = Writer.this_process()
        if not self.boot or (self.boot, self.namespace) != (here.boot, here.namespace):
            return False
        return _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class WriterLease:
    """The right of this process to write checkpoints into `folder`, which exists."""

    def __init__(self, folder: Path) -> None:
        self._file, self._token = folder / LEASE, secrets.token_hex(8)
        self._pid = os.getpid()
        self._watched: _Watched | None = None
        self._released = threading.Event()
        self._heart: threading.Thread | None = None

    def poll(self) -> bool:
        """Take the lease or see that it is held; False while it is unclear whether another writer
        lives, which is to be asked again soon. RuntimeError if one does.
        """
        if self._is_ours():
            return True
        try:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            if not self._is_abandoned():
                return False
            self._take_over()
        else:
            with os.fdopen(descriptor, "w") as stream:
                stream.write(self._content())
        self._watched, self._pid = None, os.getpid()
        self._released.clear()
        if self._heart is None or not self._heart.is_alive():
            self._heart = threading.Thread(target=self._beat, name=f"writer of {self._file.parent}", daemon=True)
            self._heart.start()
        return True

    def check(self) -> None:
        """RuntimeError if another writer has taken the folder over meanwhile."""
        if not self._is_ours():
            raise RuntimeError(
                f"{self._file.parent} was taken over by {_who(self._read())}, since this process stood still for more than "
                f"{SILENCE:.0f} s: one run writes into a folder at a time"
            )

    def release(self) -> None:
        """Let the next writer take the folder at once."""
        self._released.set()
        with contextlib.suppress(OSError):
            if self._is_ours():
                self._file.unlink()

    def _is_ours(self) -> bool:
        return self._pid == os.getpid() and _parsed(self._read()).get("token") == self._token

    def _is_abandoned(self) -> bool:
        """True if the writer is dead, False while that is unclear. RuntimeError if it lives."""
        now, content = time.monotonic(), self._read()
        try:
            touched = _touched(self._file)
        except FileNotFoundError:  # it was released at this moment
            return False
        writer = Writer.of_content(_parsed(content).get("writer"))
        if writer is not None and writer.has_ended():
            return True
        if self._watched is None or self._watched.content != content:
            self._watched = _Watched(content, touched, now, self._age(touched))
        if touched != self._watched.touched:
            raise RuntimeError(
                f"{_who(content)} is writing checkpoints into {self._file.parent}, and lives: give each run a folder of its own, "
                "or end that one first"
            )
        watched = now - self._watched.since
        return watched >= WATCHED and watched + self._watched.age >= SILENCE

    def _age(self, touched: int) -> float:
        """For how many seconds the file has been silent, by the clock of the file system."""
        probe = self._beside()
        probe.write_text(self._content())
        age = (_touched(probe) - touched) / 1e9
        probe.unlink()
        return max(0.0, age)

    def _take_over(self) -> None:
        mine = self._beside()
        mine.write_text(self._content())
        mine.replace(self._file)

    def _beside(self) -> Path:
        return self._file.with_name(f"{self._file.name}.{self._token}")

    def _content(self) -> str:
        return json.dumps({"token": self._token, "writer": asdict(Writer.this_process())})

    def _read(self) -> bytes:
        try:
            return read_bounded(self._file, MOST_BYTES)
        except (OSError, ValueError):
            return b""

    def _beat(self) -> None:
        """Touch the file, in a thread, for as long as it is ours. What a file system cannot do now
        is tried again.
        """
        while not self._released.wait(BEAT):
            with contextlib.suppress(OSError):
                if self._is_ours():
                    os.utime(self._file)


@dataclass(frozen=True)
class _Watched:
    """The lease of another writer: what was in the file, and when it was touched, at the moment
    since which it is watched; and for how many seconds it had been silent then.
    """

    content: bytes
    touched: int
    since: float
    age: float


def _touched(path: Path) -> int:
    """When a file was touched, in ns. It is opened first: a network file system then asks its
    server.
    """
    with open_regular(path) as stream:
        return os.fstat(stream.fileno()).st_mtime_ns


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _who(content: bytes) -> str:
    writer = Writer.of_content(_parsed(content).get("writer"))
    return "another process" if writer is None else str(writer)


@functools.lru_cache(maxsize=4)
def _process(pid: int) -> Writer:
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = read_bounded(Path("/proc/sys/kernel/random/boot_id"), MOST_BYTES).decode().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return Writer(socket.gethostname(), boot, namespace, pid, _started(pid))


def _started(pid: int) -> str:
    """When a process of this host started; empty for one that does not run, a zombie included."""
    try:
        fields = read_bounded(Path(f"/proc/{pid}/stat"), MOST_BYTES).rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
