"""StoreFolder: a folder of a store without renames, which is whole once it has its manifest and no
marker.

Files are written where they will stay: first a marker, then those of all ranks, last the manifest
with their hashes. Then the marker is deleted, which no store does by half. A folder with a marker
is unfinished: it is never read, and the next save of the same name deletes it. To replace a folder,
the new one is written under a second name beside it, and the old one is deleted once the new one is
whole. The second name stays until the next replacement, which takes the first one again. If a crash
leaves two whole folders, the one that was saved last counts.

This needs no more of a store than that every process sees what was written and deleted. Since a
store has no exclusive creation, nothing keeps two runs out of one folder. A run that misses its
marker where it writes raises an error, and files that two runs have mixed do not have the hashes of
the manifest.
"""

import contextlib
import re
from dataclasses import dataclass
from typing import Any

from zerocast.checkpoint.manifest import Manifest
from zerocast.checkpoint.store import Place, StorePath
from zerocast.checkpoint.whole_folder import (
    MARKER,
    NEW,
    TEMPORARY,
    Folder,
    WholeFolder,
    discard,
    has_manifest,
    is_unfinished,
    mark,
    marker_token,
    retire,
)


@dataclass(frozen=True)
class StoreFolder(Folder[StorePath]):
    """A folder of a store, which one run writes."""

    @property
    def partial(self) -> StorePath:
        """The folder that this save is writing into. RuntimeError if another process has begun to
        write there since `begin`.
        """
        for folder in (self.path, self._beside(NEW)):
            if marker_token(folder) == self.token:
                return folder
        raise RuntimeError(f"another process writes into {self.path}: give each run a folder of its own")

    @property
    def current_path(self) -> StorePath:
        """The whole folder that was saved last; the path if there is none."""
        whole = self._whole()
        return max(whole, key=_save_number) if len(whole) > 1 else next(iter(whole), self.path)

    @classmethod
    def remains(cls, parent: StorePath, name: str) -> list[StorePath]:
        """The unfinished folders in `parent` that saves of folders whose name matches the pattern
        `name` have left.
        """
        pattern = re.compile(f"(?:{name})(?:{TEMPORARY}{re.escape(NEW)})?")
        return [path for path in parent.iterdir() if pattern.fullmatch(path.name) and is_unfinished(path)]

    def holds_anything(self) -> bool:
        """True if something other than an unfinished folder is at the path."""
        return not is_unfinished(self.path) and super().holds_anything()

    def begin(self) -> StorePath:
        """Delete what interrupted saves have left of this folder, and mark the folder that this
        save writes into, which is returned. FileExistsError as from WholeFolder.
        """
        self._check_replaceable()
        self.settle()
        folder = self._beside(NEW) if self.path in self._whole() else self.path
        discard([folder])
        mark(folder, self.token)
        return folder

    def abandon(self) -> None:
        """Delete what was written, unless it is whole. Errors are ignored."""
        with contextlib.suppress(OSError, RuntimeError):
            discard([self.partial])

    def commit(self) -> None:
        """Make the folder, whose manifest is written, whole, and delete what was there before."""
        written = self.partial
        (written / MARKER).unlink()
        self._discard_all_but(written)

    def settle(self) -> None:
        """Finish a replacement that was interrupted once the new folder was whole."""
        self._discard_all_but(self.current_path)

    def _discard_all_but(self, kept: StorePath) -> None:
        discard([retire(folder) for folder in self._whole() if folder != kept])

    def _whole(self) -> list[StorePath]:
        folders = (self.path, *self._temporary(NEW))
        return [folder for folder in folders if has_manifest(folder) and not is_unfinished(folder)]


def folder_at(path: Place, token: str = "") -> Folder[Any]:
    """The folder at a local path or in a store."""
    return StoreFolder(path, token=token) if isinstance(path, StorePath) else WholeFolder(path, token=token)


def _save_number(folder: StorePath) -> int:
    """The number of a save among those of its folder; -1 if the manifest is damaged."""
    try:
        manifest = Manifest.read(folder)
    except (OSError, ValueError):
        manifest = None
    return -1 if manifest is None else manifest.lineage.number
