"""Ways to write a folder that lose it when the power goes, for the harness to find. Each breaks this process for good."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

from torch.distributed.checkpoint.filesystem import FileSystem

from zerocast.checkpoint import checkpoints, manifest, torch_checkpoint, whole_folder
from zerocast.checkpoint.whole_folder import NEW, WholeFolder, sync_folder
from zerocast.serve import safetensors_file


def _put(target: object, name: str, what: object) -> Callable[[], object]:
    return mock.patch.object(target, name, what).start


def _nothing(*_: object) -> None:
    pass


def _torch_syncs() -> None:
    """As torch does it, before the buffer is flushed."""

    class Unsynced(torch_checkpoint.HashedFiles, FileSystem):
        pass

    def init(self: torch_checkpoint.ClearWriter, folder: Path) -> None:
        torch_checkpoint.FileSystemWriter.__init__(self, folder, sync_files=True)
        self.fs = Unsynced()
        self.path = folder

    _put(torch_checkpoint.ClearWriter, "__init__", init)()


def _commits_before_sync(self: WholeFolder) -> None:
    self.partial.rename(self._beside(NEW) if self.holds_anything() else self.path)
    sync_folder(self.current_path)
    sync_folder(self.path.parent)
    self.finish_replacement()


def _deletes_first(self: WholeFolder) -> None:
    sync_folder(self.partial)
    shutil.rmtree(self.path, ignore_errors=True)
    self.partial.rename(self.path)
    sync_folder(self.path.parent)


def _through_another_name(self: WholeFolder) -> None:
    """What zerocast did at first."""
    sync_folder(self.partial)
    if self.holds_anything():
        before = self.path.with_name(f"{self.path.name}.before.partial")
        self.path.rename(before)
        self.partial.rename(self.path)
        shutil.rmtree(before, ignore_errors=True)
    else:
        self.partial.rename(self.path)
    sync_folder(self.path.parent)


def _syncs_at_the_end(self: WholeFolder) -> None:
    sync_folder(self.partial)
    self.partial.rename(self._beside(NEW) if self.holds_anything() else self.path)
    self.finish_replacement()
    sync_folder(self.path.parent)


def _discards_unsynced(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _settles_unsynced() -> None:
    _put(WholeFolder, "commit", _syncs_at_the_end)()
    _put(whole_folder, "discard", _discards_unsynced)()


def _makes_parents(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)


MUTANTS: dict[str, Callable[[], object]] = {
    "files are synced by torch": _torch_syncs,
    "files are not synced": _put(torch_checkpoint, "sync_file", _nothing),
    "exported files are not synced": _put(safetensors_file, "sync_file", _nothing),
    "the manifest is not synced": _put(manifest, "sync_file", _nothing),
    "folders are not synced": _put(whole_folder, "sync_folder", _nothing),
    "new parents are not synced": _put(whole_folder, "_make_parents", _makes_parents),
    "the folder is synced after its rename": _put(WholeFolder, "commit", _commits_before_sync),
    "the old one is deleted first": _put(WholeFolder, "commit", _deletes_first),
    "the old one is renamed first": _put(WholeFolder, "commit", _through_another_name),
    "the new name is synced after the old one is deleted": _settles_unsynced,
    "what is pruned is deleted before its new name is synced": _put(checkpoints, "discard", _discards_unsynced),
    "a replacement stays as a crash has left it": _put(WholeFolder, "settle", _nothing),
}
