"""StoreFolder: a folder of a store without renames, which is complete once it has its manifest and
no marker.

Files are written to their final paths: first a marker, then the files of all ranks, last the
manifest with their hashes. Then the marker is deleted, which is atomic in every store. A folder
with a marker is unfinished: it is never read, and the next save of the same name deletes it. To
replace a folder, the new one is written under a second name in the same folder, and the old one is
deleted once the new one is complete. The second name stays until the next replacement, which uses
the first one again. If a crash leaves two complete folders, the one that was saved last counts.

This requires only that every process sees writes and deletions in the store. Since a store has no
exclusive creation, nothing prevents two runs from writing into one folder. A run whose marker is
gone raises an error, and mixed files of two runs do not match the hashes of the manifest.
"""

import contextlib
import re
from dataclasses import dataclass
from typing import Any

from zerocast.checkpoint.manifest import Manifest
from zerocast.checkpoint.store import Location, StorePath
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
    mark_incomplete,
    marker_token,
)


@dataclass(frozen=True)
class StoreFolder(Folder[StorePath]):
    """A folder of a store, which one run writes."""

    @property
    def partial(self) -> StorePath:
        """The folder that this save is writing into. Raises RuntimeError if another process has
        begun to write into it since `begin`.
        """
        for folder in (self.path, self._sibling(NEW)):
            if marker_token(folder) == self.token:
                return folder
        raise RuntimeError(f"another process writes into {self.path}: use a separate folder for each run")

    @property
    def current_path(self) -> StorePath:
        """The complete folder that was saved last; the path if there is none."""
        whole = self._whole()
        return max(whole, key=_save_number) if len(whole) > 1 else next(iter(whole), self.path)

    @classmethod
    def remains(cls, parent: StorePath, name: str) -> list[StorePath]:
        """Return the unfinished folders in `parent` that saves of folders whose name matches the
        pattern `name` have left.
        """
        pattern = re.compile(f"(?:{name})(?:{TEMPORARY}{re.escape(NEW)})?")
        return [path for path in parent.iterdir() if pattern.fullmatch(path.name) and is_unfinished(path)]

    def holds_anything(self) -> bool:
        """Return True if something other than an unfinished folder is at the path."""
        return not is_unfinished(self.path) and super().holds_anything()

    def begin(self) -> StorePath:
        """Delete the remains of interrupted saves of this folder, and mark and return the folder
        that this save writes into. Raises FileExistsError, with nothing changed, if something at
        the path may not be replaced.
        """
        self._check_replaceable()
        self.finish_replacement()
        folder = self._sibling(NEW) if self.path in self._whole() else self.path
        discard([folder])
        mark(folder, self.token)
        return folder

    def abandon(self) -> None:
        """Delete the written files, unless the folder is complete. Errors are ignored."""
        with contextlib.suppress(OSError, RuntimeError):
            discard([self.partial])

    def commit(self) -> None:
        """Mark the folder, whose manifest is written, as complete, and delete the previous one."""
        written = self.partial
        (written / MARKER).unlink()
        self._discard_all_but(written)

    def finish_replacement(self) -> None:
        """Finish a replacement that was interrupted after the new folder was complete."""
        self._discard_all_but(self.current_path)

    def _discard_all_but(self, kept: StorePath) -> None:
        discard([mark_incomplete(folder) for folder in self._whole() if folder != kept])

    def _whole(self) -> list[StorePath]:
        folders = (self.path, *self._temporary(NEW))
        return [folder for folder in folders if has_manifest(folder) and not is_unfinished(folder)]


def folder_at(path: Location, token: str = "", replaces_checkpoints: bool = False) -> Folder[Any]:
    """Return the folder at a local path or in a store."""
    if isinstance(path, StorePath):
        return StoreFolder(path, token, replaces_checkpoints)
    return WholeFolder(path, token, replaces_checkpoints)


def _save_number(folder: StorePath) -> int:
    """Return the number of a save among those of its folder; -1 if the manifest is damaged."""
    try:
        manifest = Manifest.read(folder)
    except (OSError, ValueError):
        manifest = None
    return -1 if manifest is None else manifest.lineage.number
