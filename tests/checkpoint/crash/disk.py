"""The calls of a process, recorded by `recorder.c`, and a disk after a power failure: what may be left of them.

The model of the disk is weaker than ext4, XFS or NFS and as weak as is reasonable:

* The bytes of a file, and its length, are on the disk once the file was synced after they were
  written. Of what was written since, each write may be there or not, in any combination, also half of
  it, and a file may be as long as it was going to be and hold zeros.
* An entry of a folder (a file or folder made, renamed or deleted) is on the disk once that *folder*
  was synced; the sync of a file does not bring its name there. Of the entries changed since, each may
  have been or not, in any combination.
* A rename is atomic: the old name or the new one, never both or neither. A change that cannot have
  been made without another that is lost (a rename onto a folder that is not empty, an entry of a
  folder that is nowhere) is lost too.
* A kill loses nothing: all calls until then have been made.

Files and folders are inodes here: what is deleted from a folder is deleted from it whatever name the
folder has on the disk.
"""

import ctypes
import functools
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import NamedTuple

SOURCE = Path(__file__).with_name("recorder.c")


class Record(NamedTuple):
    """One call, in the order in which calls returned; `data` is what a write wrote."""

    what: str
    fields: tuple[str, ...]
    data: bytes = b""


@functools.cache
def why_nothing_is_recorded() -> str | None:
    """Why nothing can be recorded here; None where it can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return (
            f"system calls are trapped on Linux on x86_64 and aarch64, this is {sys.platform} on {platform.machine()}"
        )
    if _compiler() is None:
        return "there is no C compiler (cc, gcc or g++)"
    tried = (
        f"import ctypes, sys; sys.exit(ctypes.CDLL({str(recorder_library())!r}).crash_begin(b'/nowhere', b'/dev/null'))"
    )
    status = subprocess.run([sys.executable, "-c", tried], check=False).returncode
    return f"the kernel installs no seccomp filter: {os.strerror(status)}" if status else None


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


@functools.cache
def recorder_library() -> Path:
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


Tree = dict[str, bytes | None]  # by path; None for a folder


@dataclass
class _Node:
    entries: "dict[str, _Node] | None" = None  # None for a file
    data: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, eq=False)
class Change:
    """One change of an inode: bytes of a file, or names in a folder. `mark` is set where it changes nothing and is a mark."""

    what: str
    node: int
    name: str = ""
    other: int = -1  # the inode that gets the name, or the folder that it is renamed into
    target: str = ""
    offset: int = 0
    data: bytes = b""


class Disk:
    """The changes of a log by inode, over what was under `root` at its beginning."""

    def __init__(self, before: Tree, root: Path, records: Iterable[Record]) -> None:
        self._root, self._before, self._count = root, before, 1
        self.changes: list[Change] = []
        self._paths: dict[PurePath, int] = {PurePath(): 0}
        self._files: dict[tuple[str, str], int] = {}
        for path in sorted(before):
            self._paths[PurePath(path)] = self._new()
        self._names = dict(self._paths)  # as they were
        for record in records:
            getattr(self, f"_{record.what}")(*record.fields, *([record.data] if record.what == "write" else []))

    def marks(self) -> dict[str, int]:
        """How many changes were made before each mark."""
        return {change.name: index for index, change in enumerate(self.changes) if change.what == "mark"}

    def states(self, end: int, draw: random.Random, some: int) -> Iterator[Tree]:
        """What may be left when the power goes after `end` changes: all of it, as after a kill, then none, then combinations."""
        lost = self._pending(end)
        yield self.after(end, frozenset())
        yield self.after(end, frozenset(lost))
        data = {index for index in lost if self.changes[index].what in ("write", "truncate")}
        yield self.after(end, frozenset(data))
        yield self.after(end, frozenset(set(lost) - data))
        for _ in range(some):
            share = draw.choice([0.1, 0.5, 0.9])
            yield self.after(end, frozenset(i for i in lost if draw.random() < share), draw)
        for index in draw.sample(lost, min(len(lost), some)):
            yield self.after(end, frozenset({index}))
            yield self.after(end, frozenset(lost) - {index})

    def after(self, end: int, lost: frozenset[int], draw: random.Random | None = None) -> Tree:
        """Return the disk after the first `end` changes, without the `lost` ones. With `draw`, lost
        changes may be there in part.
        """
        nodes = {0: _Node({})}
        for path, index in self._names.items():
            if index:
                content = self._before[str(path)]
                nodes[index] = _Node({}) if content is None else _Node(None, bytearray(content))
                _entries(nodes[self._names[path.parent]])[path.name] = nodes[index]
        for index, change in enumerate(self.changes[:end]):
            if index not in lost:
                _make(nodes, change, len(change.data))
            elif draw is not None and change.what == "write" and draw.random() < 0.5:
                _make(nodes, change, draw.choice([0, len(change.data) // 2]))
        return dict(_listed(nodes[0], PurePath()))

    def _pending(self, end: int) -> list[int]:
        """Changes that no sync has brought to the disk."""
        pending: dict[int, Change] = {}
        for index, change in enumerate(self.changes[:end]):
            if change.what == "sync":
                pending = {i: one for i, one in pending.items() if not _is_synced(one, change.node)}
            elif change.what != "mark":
                pending[index] = change
        return list(pending)

    def _new(self) -> int:
        self._count += 1
        return self._count - 1

    def _at(self, path: str) -> tuple[int, str, PurePath]:
        """The inode of the folder, the name in it, and both."""
        place = PurePath(path).relative_to(self._root)
        return self._paths[place.parent] if place.name else 0, place.name, place

    def _open(self, process: str, descriptor: str, flags: str, path: str) -> None:
        folder, name, place = self._at(path)
        if place not in self._paths:
            assert int(flags) & os.O_CREAT, f"{path} was there, and nobody made it"
            self._paths[place] = self._new()
            self.changes.append(Change("file", folder, name, self._paths[place]))
        elif int(flags) & os.O_TRUNC:
            self.changes.append(Change("truncate", self._paths[place]))
        self._files[process, descriptor] = self._paths[place]

    def _close(self, process: str, descriptor: str) -> None:
        del self._files[process, descriptor]

    def _write(self, process: str, descriptor: str, offset: str, length: str, data: bytes) -> None:
        self.changes.append(Change("write", self._files[process, descriptor], offset=int(offset), data=data))

    def _truncate(self, process: str, descriptor: str, length: str) -> None:
        self.changes.append(Change("truncate", self._files[process, descriptor], offset=int(length)))

    def _fsync(self, process: str, descriptor: str) -> None:
        self.changes.append(Change("sync", self._files[process, descriptor]))

    def _mkdir(self, path: str) -> None:
        folder, name, place = self._at(path)
        self._paths[place] = self._new()
        self.changes.append(Change("folder", folder, name, self._paths[place]))

    def _unlink(self, path: str) -> None:
        folder, name, place = self._at(path)
        del self._paths[place]
        self.changes.append(Change("delete", folder, name))

    _rmdir = _unlink

    def _rename(self, path: str, target: str) -> None:
        (folder, name, place), (into, new, end) = self._at(path), self._at(target)
        self._paths = {one: index for one, index in self._paths.items() if end != one and end not in one.parents}
        moved = {one: index for one, index in self._paths.items() if place == one or place in one.parents}
        for one in moved:
            del self._paths[one]
        self._paths |= {end / one.relative_to(place): index for one, index in moved.items()}
        self.changes.append(Change("rename", folder, name, into, new))

    def _mark(self, text: str) -> None:
        self.changes.append(Change("mark", -1, text))


def _is_synced(change: Change, node: int) -> bool:
    """Whether a sync of `node` brings it to the disk; a rename between two folders is not, before both are synced."""
    return change.node == node and (change.what != "rename" or change.other == node)


def _make(nodes: dict[int, _Node], change: Change, length: int) -> None:
    """Make a change, of a write the first `length` bytes and zeros after them; nothing where it cannot be made."""
    node = nodes.setdefault(change.node, _Node({} if change.what in ("file", "folder", "delete", "rename") else None))
    if change.what == "write":
        end = change.offset + len(change.data)
        node.data.extend(bytes(max(0, end - len(node.data))))
        node.data[change.offset : change.offset + length] = change.data[:length]
    elif change.what == "truncate":
        node.data[change.offset :] = bytes(max(0, change.offset - len(node.data)))
    elif change.what in ("file", "folder"):
        empty = _Node({} if change.what == "folder" else None)
        _entries(node).setdefault(change.name, nodes.setdefault(change.other, empty))
    elif change.what == "delete":
        found = _entries(node).get(change.name)
        if found is not None and not found.entries:
            del _entries(node)[change.name]
    elif change.what == "rename":
        _rename(node, nodes[change.other], change)


def _rename(folder: _Node, into: _Node, change: Change) -> None:
    moved, there = _entries(folder).get(change.name), _entries(into).get(change.target)
    if moved is not None and not (there is not None and there.entries):
        _entries(into)[change.target] = moved
        del _entries(folder)[change.name]


def _entries(node: _Node) -> dict[str, _Node]:
    assert node.entries is not None
    return node.entries


def _listed(node: _Node, at: PurePath) -> Iterator[tuple[str, bytes | None]]:
    for name, found in (node.entries or {}).items():
        yield str(at / name), None if found.entries is not None else bytes(found.data)
        yield from _listed(found, at / name)


def read_tree(root: Path) -> Tree:
    """All that is under a folder."""
    paths = sorted(root.rglob("*"))
    return {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in paths}


def write_tree(tree: Tree, root: Path) -> None:
    """Under a folder that does not exist."""
    root.mkdir()
    for name in sorted(tree):
        content = tree[name]
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


def all_recorded(records: Sequence[Record]) -> bool:
    """Whether nothing was done whose effect was not recorded."""
    return not any(record.what in ("map", "unknown", "link", "symlink", "exchange") for record in records)
