"""Folder: a folder that is written completely or not at all. WholeFolder: such a folder of a local
file system.

Exports and checkpoints are such folders. Files are written into a temporary folder next to the path
and synced, with their directory entries. One rename then gives the folder its name. To replace a
folder, the new one is first renamed to a second name, under which readers already find it. It gets
its final name once the old folder was moved away. So a complete folder exists at every moment, and
readers move nothing: the next save finishes an interrupted replacement.

A temporary folder is called `<name>.zerocast-<token>.partial` or `.new`, with a token that is
unique to the save. It has a marker file with the same token and the process that writes it. Only
folders with such a name and marker are ever renamed or deleted, so a user's `<name>.partial` is
safe.

Nothing is deleted before the rename that replaces it is on the disk. The protocol needs only
renames within a directory and fsync of files and directories, which ext4, XFS, NFS and Lustre all
have; it avoids `renameat2` with RENAME_EXCHANGE, which NFS and Lustre lack.
`tests/checkpoint/crash` cuts the power at every call.
"""

import abc
import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from zerocast.checkpoint.store import Location, StorePath
from zerocast.checkpoint.writer import Writer, read_record, record_of_this_process

# Suffixes of temporary folders: of one that is being written, and of a complete one that is to
# replace another.
PARTIAL = ".partial"
NEW = ".new"
# A pattern for the part between the name of a folder and the suffix.
TEMPORARY = r"\.zerocast-([0-9a-f]{16})"
MARKER = ".zerocast-writer"
MANIFEST = "manifest.json"
LocationT = TypeVar("LocationT", Path, StorePath)


def has_manifest(folder: Location) -> bool:
    """Return True if a folder has a manifest, which only zerocast writes."""
    return (folder / MANIFEST).is_file()


def is_unfinished(folder: Location) -> bool:
    """Return True for a folder of a store that is being written or deleted, or whose save or
    deletion was interrupted.
    """
    return isinstance(folder, StorePath) and (folder / MARKER).is_file()


def sizes_of(folder: Location) -> dict[str, int]:
    """Return the size in bytes of each file in a folder, keyed by name."""
    if isinstance(folder, StorePath):
        return folder.sizes()
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def check_written(folder: Location, sizes: Mapping[str, int]) -> None:
    """Raise RuntimeError on rank 0 unless it sees exactly the files of all ranks in the folder,
    with these sizes keyed by name.
    """
    seen = {name: nbytes for name, nbytes in sizes_of(folder).items() if name != MARKER}
    differing = sorted(name for name in {*sizes, *seen} if sizes.get(name) != seen.get(name))
    if differing:
        name = differing[0]
        raise RuntimeError(
            f"{folder / name} has {seen.get(name, 'no')} bytes as rank 0 sees it, and {sizes.get(name, 'none')} were written: "
            "all ranks must write into one shared folder, and no other process may"
        )


@dataclass(frozen=True)
class Folder(abc.ABC, Generic[LocationT]):
    """The folder at `path`, which one process writes.

    Attributes:
        path: the path of the folder once it is complete.
        token: makes the names of temporary folders unique. Processes that write the folder together
            share it.
        replaces_checkpoints: True if the folder replaces one with a manifest, which only zerocast
            writes. Anything else at the path is an error.
    """

    path: LocationT
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    replaces_checkpoints: bool = False

    @property
    @abc.abstractmethod
    def partial(self) -> LocationT:
        """The folder that files are written into."""

    @property
    @abc.abstractmethod
    def current_path(self) -> LocationT:
        """The path of the complete folder that was written last, which may be a temporary name;
        `path` if there is none.
        """

    @abc.abstractmethod
    def begin(self) -> LocationT:
        """Delete the remains of interrupted saves of this folder, and create and return `partial`.
        Raises FileExistsError, with nothing changed, if something at the path may not be replaced.
        """

    @abc.abstractmethod
    def abandon(self) -> None:
        """Delete the written files. Errors are ignored."""

    @abc.abstractmethod
    def commit(self) -> None:
        """Make the written folder the folder at the path, and delete the previous one."""

    @abc.abstractmethod
    def finish_replacement(self) -> None:
        """Finish a replacement that was committed and then interrupted."""

    @classmethod
    @abc.abstractmethod
    def remains(cls, parent: LocationT, name: str) -> list[LocationT]:
        """Return the folders in `parent` that interrupted saves of folders whose name matches the
        pattern `name` have left.
        """

    def holds_anything(self) -> bool:
        """Return True if something other than an empty folder is at the path."""
        return self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir()))

    def _check_replaceable(self) -> None:
        if self.holds_anything() and not (self.replaces_checkpoints and has_manifest(self.path)):
            raise FileExistsError(
                f"{self.path} already exists: checkpoints, and files that zerocast has not written, are not overwritten; delete it "
                "or choose a different path"
            )

    def _temporary(self, suffix: str) -> list[LocationT]:
        return temporary_folders(self.path.parent, re.escape(self.path.name), suffix)

    def _sibling(self, suffix: str) -> LocationT:
        return self.path.with_name(f"{self.path.name}.zerocast-{self.token}{suffix}")


@dataclass(frozen=True)
class WholeFolder(Folder[Path]):
    """A folder of a local file system."""

    @property
    def partial(self) -> Path:
        """The temporary folder that files are written into."""
        return self._sibling(PARTIAL)

    @property
    def current_path(self) -> Path:
        """The path of the folder that was written last. It has a temporary name if a crash
        interrupted its last rename.
        """
        return next(iter(self._temporary(NEW)), self.path)

    @classmethod
    def remains(cls, parent: Path, name: str) -> list[Path]:
        """Return the partial folders of saves that were interrupted."""
        return temporary_folders(parent, name, PARTIAL)

    def begin(self) -> Path:
        """Finish an interrupted replacement, delete partial folders of this name by dead processes,
        and create and return `partial`. Raises FileExistsError, with nothing changed, if something
        at the path may not be replaced.
        """
        self._check_replaceable()
        make_folder(self.path.parent)
        self.finish_replacement()
        partial_folders = self._temporary(PARTIAL)
        writers = (
            (folder, Writer.of_content(read_record(folder / MARKER).get("writer"))) for folder in partial_folders
        )
        discard([folder for folder, writer in writers if writer is not None and writer.has_ended()])
        self.partial.mkdir()
        mark(self.partial, self.token)
        return self.partial

    def abandon(self) -> None:
        """Delete `partial`. Errors are ignored."""
        _delete(self.partial)

    def commit(self) -> None:
        """Rename `partial`, whose files are synced, to the path and delete the previous folder."""
        sync(self.partial)
        self._check_replaceable()
        replaces = self.holds_anything()
        self.partial.rename(self._sibling(NEW) if replaces else self.path)
        sync(self.path.parent)
        self.finish_replacement()
        (self.path / MARKER).unlink(missing_ok=True)

    def finish_replacement(self) -> None:
        """Finish a replacement that was committed and then interrupted."""
        for new in self._temporary(NEW):
            self._check_replaceable()
            old = [mark_incomplete(self.path)] if self.path.exists() else []
            new.rename(self.path)
            discard(old)
            (self.path / MARKER).unlink(missing_ok=True)


def temporary_folders(parent: LocationT, name: str, suffix: str) -> list[LocationT]:
    """Return the temporary folders in `parent` of folders whose name matches the pattern `name`, if
    they are provably zerocast's.
    """
    pattern = re.compile(f"(?:{name}){TEMPORARY}{re.escape(suffix)}")
    if not parent.is_dir():
        return []
    named = [(path, match[1]) for path in parent.iterdir() if (match := pattern.fullmatch(path.name))]
    return sorted((path for path, token in named if _is_ours(path, token)), key=str)


def mark_incomplete(path: Location) -> Location:
    """Change a folder that zerocast wrote so that it no longer looks complete: rename it, or in a
    store mark it. Returns its new path, for `discard`.
    """
    if isinstance(path, StorePath):
        mark(path, secrets.token_hex(8))
        return path
    retired = path.with_name(f"{path.name}.zerocast-{secrets.token_hex(8)}{PARTIAL}")
    path.rename(retired)
    return retired


def discard(folders: Iterable[Location]) -> None:
    """Delete temporary folders of one parent. Their names are synced first, so that after a power
    failure no partly deleted folder has its old name.
    """
    for number, folder in enumerate(folders):
        if number == 0:
            sync(folder.parent)
        _delete(folder)


def sync(path: Location) -> None:
    """Persist a file, which another process or library may have written, or the entries of a
    directory, which fsync of a file does not persist. A store persists its files itself.
    """
    if isinstance(path, StorePath):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Location) -> None:
    """Create a folder and its parents, and persist their names. A store makes them with a file."""
    if isinstance(path, StorePath):
        return
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def mark(folder: Location, token: str) -> None:
    """Write the marker and sync it, before anything else is in the folder."""
    (folder / MARKER).write_text(record_of_this_process(token))
    sync(folder / MARKER)
    sync(folder)


def marker_token(folder: Location) -> Any:
    """Return the token in the marker of a folder; None if it has no marker."""
    return read_record(folder / MARKER).get("token")


def _is_ours(folder: Location, token: str) -> bool:
    """Return True if zerocast made a folder with a temporary name: it has a marker with the token,
    or a manifest, or nothing except a marker that a power failure damaged.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    marked = marker_token(folder) == token
    return marked or has_manifest(folder) or {path.name for path in folder.iterdir()} <= {MARKER}


def _delete(folder: Location) -> None:
    """Delete a temporary folder, ignoring errors. Its marker and manifest are deleted last, so that
    the next save recognizes the folder and can finish the deletion.
    """
    if isinstance(folder, StorePath):
        with contextlib.suppress(OSError):
            folder.rmtree(last=MARKER)
        return
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name in (MARKER, MANIFEST):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    with contextlib.suppress(OSError):
        sync(folder)
    shutil.rmtree(folder, ignore_errors=True)
