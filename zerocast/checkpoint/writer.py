"""Writer, the process that writes a folder, and WriterLease, which ensures that a folder has one
living writer.

The lease is a file in a folder of checkpoints. Its writer touches the file every few seconds while
it is alive. A second writer finds the file and watches it. If the file is touched, the first writer
is alive, and the second gets an error. A writer on this host counts as dead once its process has
ended. A writer on another host, or in a container with separate process numbers, counts as dead if
the file was not touched for a while. Clocks of hosts are never compared; the age of the file is the
difference between two timestamps of the file system.

A lock of the file system (flock) is not used, since several network file systems have none.
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

from zerocast.checkpoint.store import Location, open_regular, read_bounded

LEASE = ".writer.json"
# Seconds between two touches of a lease.
BEAT = 2.0
# The minimum time, in seconds, to watch a lease before its writer counts as dead.
WATCHED = 5.0
# Seconds without a touch after which a writer counts as dead.
SILENCE = 15.0
# The largest record of a process that is read.
MAX_BYTES = 2**12


@dataclass(frozen=True)
class Writer:
    """A process, identified across hosts and restarts.

    Attributes:
        host: the name of the host, for messages.
        boot: the boot id of the host. It differs after a restart, and is the same in all containers
            of a host.
        namespace: the namespace of the process number. A container has its own.
        pid: the process number.
        started: the start of the process in ticks since the boot, since process numbers are reused.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: str

    @staticmethod
    def this_process() -> "Writer":
        """Return the process that calls this."""
        return _process(os.getpid())

    @staticmethod
    def of_content(content: Any) -> "Writer | None":
        """Return a writer from the parsed JSON of `dataclasses.asdict`; None for anything else."""
        try:
            return Writer(**content) if isinstance(content["pid"], int) else None
        except (KeyError, TypeError):
            return None

    def has_ended(self) -> bool:
        """Return True if the process has certainly ended. False if it is not visible from this
        process.
        """
        here = Writer.this_process()
        if not self.boot or (self.boot, self.namespace) != (here.boot, here.namespace):
            return False
        return _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class WriterLease:
    """The right of this process to write checkpoints into `folder`, which exists."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / LEASE
        self._token = secrets.token_hex(8)
        # The process that took the lease. A forked child does not have it.
        self._pid = os.getpid()
        # The lease of another writer, while `poll` finds out if that writer is alive.
        self._watched: _Watched | None = None
        self._released = threading.Event()
        # The thread that touches the file, from the first time that the lease was taken.
        self._heart: threading.Thread | None = None

    def poll(self) -> bool:
        """Take the lease, unless this process has it already. Returns False while it is unclear
        whether another writer is alive; call again soon. Raises RuntimeError if another writer is
        alive.
        """
        if self._is_ours():
            return True
        try:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            if not self._is_abandoned():
                return False
            self._write_own_file().replace(self._file)
        else:
            with os.fdopen(descriptor, "w") as stream:
                stream.write(record_of_this_process(self._token))
        self._watched = None
        self._pid = os.getpid()
        self._released.clear()
        if self._heart is None or not self._heart.is_alive():
            self._heart = threading.Thread(target=self._beat, name=f"writer of {self._file.parent}", daemon=True)
            self._heart.start()
        return True

    def check(self) -> None:
        """Raise RuntimeError if another writer took the folder over after this process acquired the
        lease.
        """
        if not self._is_ours():
            raise RuntimeError(
                f"{self._file.parent} was taken over by {_who(read_record(self._file))}, since this process was stopped for more "
                f"than {SILENCE:.0f} s: one run writes into a folder at a time"
            )

    def release(self) -> None:
        """Release the lease, so that the next writer can acquire it immediately."""
        self._released.set()
        with contextlib.suppress(OSError):
            if self._is_ours():
                self._file.unlink()

    def _is_ours(self) -> bool:
        return self._pid == os.getpid() and read_record(self._file).get("token") == self._token

    def _is_abandoned(self) -> bool:
        """Return True if the writer is dead, False while that is unclear. Raises RuntimeError if it
        is alive.
        """
        now = time.monotonic()
        record = read_record(self._file)
        try:
            touched = _touched(self._file)
        except FileNotFoundError:
            # The writer released the lease just now.
            return False
        writer = Writer.of_content(record.get("writer"))
        if writer is not None and writer.has_ended():
            return True
        if self._watched is None or self._watched.record != record:
            self._watched = _Watched(record, touched, now, self._age(touched))
        if touched != self._watched.touched:
            raise RuntimeError(
                f"{_who(record)} is still writing checkpoints to {self._file.parent}: use one folder per run, or stop "
                "that run"
            )
        watched = now - self._watched.since
        return watched >= WATCHED and watched + self._watched.age >= SILENCE

    def _age(self, touched: int) -> float:
        """Return the seconds since the file was touched, by the clock of the file system."""
        probe = self._write_own_file()
        age = (_touched(probe) - touched) / 1e9
        probe.unlink()
        return max(0.0, age)

    def _write_own_file(self) -> Path:
        """Write a record of this process beside the lease, and return its path."""
        path = self._file.with_name(f"{self._file.name}.{self._token}")
        path.write_text(record_of_this_process(self._token))
        return path

    def _beat(self) -> None:
        """Touch the file as long as this process has the lease; runs in a thread. Errors of the
        file system are ignored, since the next touch may succeed.
        """
        while not self._released.wait(BEAT):
            with contextlib.suppress(OSError):
                if self._is_ours():
                    os.utime(self._file)


class NoLease:
    """The right to write into a folder of a store, which has neither exclusive creation nor
    timestamps that could be compared. Every process has this right.
    """

    def poll(self) -> bool:
        """Return True: nothing takes this right away."""
        return True

    def check(self) -> None:
        """Raise nothing: no other writer can take this right."""

    def release(self) -> None:
        """Leave the store as it is: there is no lease to remove."""


@dataclass(frozen=True)
class _Watched:
    """The lease of another writer, when it was first read.

    Attributes:
        record: the content of the file, as `read_record` returns it.
        touched: the time of its last touch, in ns, by the clock of the file system.
        since: the time of the first read, in seconds, by the monotonic clock of this process.
        age: the seconds between the last touch and the first read.
    """

    record: dict[str, Any]
    touched: int
    since: float
    age: float


def _touched(path: Path) -> int:
    """Return the time of the last touch of a file, in ns. The file is opened first, since a network
    file system then asks its server instead of a cache.
    """
    with open_regular(path) as stream:
        return os.fstat(stream.fileno()).st_mtime_ns


def record_of_this_process(token: str) -> str:
    """Return the text of a file by which a process says that it writes a folder."""
    return json.dumps({"token": token, "writer": asdict(Writer.this_process())})


def read_record(path: Location) -> dict[str, Any]:
    """Return the token and writer in a file of `record_of_this_process`; nothing from a file that
    is missing or damaged.
    """
    try:
        record = json.loads(read_bounded(path, MAX_BYTES))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _who(record: dict[str, Any]) -> str:
    writer = Writer.of_content(record.get("writer"))
    return "another process" if writer is None else str(writer)


@functools.lru_cache(maxsize=4)
def _process(pid: int) -> Writer:
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = read_bounded(Path("/proc/sys/kernel/random/boot_id"), MAX_BYTES).decode().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return Writer(socket.gethostname(), boot, namespace, pid, _started(pid))


def _started(pid: int) -> str:
    """Return the start time of a process of this host; empty if it does not run or is a zombie."""
    try:
        fields = read_bounded(Path(f"/proc/{pid}/stat"), MAX_BYTES).rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
