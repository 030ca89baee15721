"""WholeFolder: a folder that is written whole or not at all.

Exports and checkpoints are such folders. Files are written into `<path>.partial` and synced, with
their directory entries. One rename then gives the folder its name. Where a folder exists already,
the rename goes to `<path>.new`, which from then on counts as that folder; it takes the name itself
once the old folder has moved out of the way. A whole folder thus exists at every moment, and
readers move nothing: the next save finishes what a crash interrupted.

Nothing is deleted before the rename that replaces it is on the disk. The protocol needs only
renames within a directory and fsync of files and directories, which ext4, XFS, NFS and Lustre all
have; it avoids `renameat2` with RENAME_EXCHANGE, which NFS and Lustre lack.
`tests/checkpoint/crash` cuts the power at every call.
"""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PARTIAL, NEW = ".partial", ".new"


@dataclass(frozen=True)
class WholeFolder:
    """The folder at `path`, which one process writes."""

    path: Path

    @property
    def partial(self) -> Path:
        """The temporary folder that files are written into."""
        return self._beside(PARTIAL)

    @property
    def found(self) -> Path:
        """The folder that was written last: `<path>.new` if a crash interrupted its last rename."""
        return new if (new := self._beside(NEW)).is_dir() else self.path

    def holds_anything(self) -> bool:
        """True if something other than an empty folder is at the path."""
        return self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir()))

    def begin(self) -> None:
        """Finish an interrupted replacement and create an empty `partial`."""
        _make_parents(self.partial)
        self.settle()
        self.abandon()
        self.partial.mkdir()

    def abandon(self) -> None:
        """Delete `partial`, as far as it can be deleted."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def commit(self) -> None:
        """Rename `partial`, whose files are synced, to the path and delete what was there
        before.
        """
        sync_folder(self.partial)
        replaces = self.holds_anything()
        self.partial.rename(self._beside(NEW) if replaces else self.path)
        sync_folder(self.path.parent)
        self.settle()

    def settle(self) -> None:
        """Finish a replacement that was committed and then interrupted."""
        new = self._beside(NEW)
        if new.is_dir():
            self.abandon()
            if self.path.exists():
                self.path.rename(self.partial)
            new.rename(self.path)
            discard([self.partial])

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)


def discard(folders: Iterable[Path]) -> None:
    """Delete folders of one parent that were renamed to `*.partial`, after syncing the new
    names.
    """
    for number, folder in enumerate(folders):
        if number == 0:
            sync_folder(folder.parent)
        shutil.rmtree(folder, ignore_errors=True)


def sync_file(path: Path) -> None:
    """Persist a file with fsync; another process or library may have written it."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Persist a directory with fsync: fsync of a file does not persist its directory entry."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_parents(path: Path) -> None:
    missing = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)
