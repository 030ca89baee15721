"""Manifest: the files of a checkpoint with their sizes and hashes, written last, so that damage is found before anything is loaded.

It guards against disks and broken transfers, not against somebody who rewrites it too: what is loaded cannot run code either way
(`safe_reader.py`).
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch

from zerocast.agreement import agree, from_rank_0
from zerocast.group import Group

NAME = "manifest.json"
VERSION = 1
CHUNK = 2**20
LOADS = "loads a checkpoint"  # what ranks are in the middle of, if not in the same call


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and SHA-256 of a file."""

    nbytes: int
    sha256: str

    @staticmethod
    def of(path: Path) -> "FileSum":
        """Reads the whole file."""
        digest, nbytes = hashlib.sha256(), 0
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
                nbytes += len(chunk)
        return FileSum(nbytes, digest.hexdigest())


@dataclass(frozen=True)
class Stored:
    """Format and nominal dtype that a weight had, as text. Nothing depends on them when masters are loaded."""

    format: str
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """Sums by file name; the formats that weights had, by parameter name; the torch that wrote it."""

    files: dict[str, FileSum]
    formats: dict[str, Stored] = field(default_factory=dict)
    torch: str = torch.__version__

    @staticmethod
    def read(folder: Path) -> "Manifest | None":
        """The manifest of a checkpoint, None where there is none. ValueError for one that cannot be understood.

        A folder that is no checkpoint may hold a file of the same name that is something else.
        """
        path = folder / NAME
        if not (folder / ".metadata").is_file():
            return None
        try:
            content = json.loads(path.read_text())
            version = content["version"]
            files = {
                str(name): FileSum(int(sums["bytes"]), str(sums["sha256"])) for name, sums in content["files"].items()
            }
            formats = {
                str(name): Stored(str(one["format"]), str(one["dtype"]))
                for name, one in content.get("formats", {}).items()
            }
            written_by = str(content.get("torch", "unknown"))
        except FileNotFoundError:
            return None
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {error!r}") from None
        if version != VERSION:
            raise ValueError(f"{path} has version {version!r}, this zerocast reads version {VERSION}")
        outside = [name for name in files if PurePath(name).name != name]
        if outside:
            raise ValueError(f"{path} is damaged: {outside[0]!r} is no file of the checkpoint")
        return Manifest(files, formats, written_by)

    def write(self, folder: Path) -> None:
        """Into the folder, down to the disk."""
        files = {name: {"bytes": sums.nbytes, "sha256": sums.sha256} for name, sums in sorted(self.files.items())}
        formats = {name: {"format": one.format, "dtype": one.dtype} for name, one in sorted(self.formats.items())}
        content: dict[str, Any] = {"version": VERSION, "torch": self.torch, "files": files, "formats": formats}
        with (folder / NAME).open("w") as stream:
            json.dump(content, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())

    def check(self, folder: Path, names: Sequence[str]) -> None:
        """ValueError, with both values, for the first of these files that is not what was written."""
        for name in names:
            path, expected = folder / name, self.files[name]
            try:
                nbytes = path.stat().st_size
            except FileNotFoundError:
                raise ValueError(f"{path} is missing; it had {expected.nbytes:,} bytes when it was written") from None
            if nbytes != expected.nbytes:
                raise ValueError(f"{path} has {nbytes:,} bytes, and had {expected.nbytes:,} when it was written")
            found = FileSum.of(path)
            if found != expected:
                sums = f"its SHA-256 is {found.sha256[:16]}..., and was {expected.sha256[:16]}..."
                raise ValueError(f"{path} is damaged: {sums} when it was written")


def check_files(path: Path, group: Group) -> None:
    """ValueError on every rank if any file is not what the manifest says; each rank reads some of them.

    Without a manifest, as other programs leave a folder, there is nothing to check.
    """
    manifest: Manifest | None = from_rank_0(group, lambda: Manifest.read(path), LOADS)
    problem = None
    if manifest:
        try:
            manifest.check(path, sorted(manifest.files)[group.rank :: group.size])
        except (OSError, ValueError) as error:
            problem = error
    agree(group, [], problem, what=LOADS)
