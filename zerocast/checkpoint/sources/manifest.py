"""Manifest: the files of a checkpoint with their sizes and hashes, written last, so that damage is found before anything is loaded.

It guards against disks and broken transfers, also of the manifest, which has a hash of itself, and against folders whose names were
exchanged. It does not guard against somebody who rewrites it too: what is loaded cannot run code either way (`safe_reader.py`).
`zerocast.optim.Checkpoints`, which writes one always, requires it. Folders of other programs have none and load unchecked.
"""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import torch

from zerocast.checkpoint.regular_file import open_regular, read_bounded
from zerocast.checkpoint.whole_folder import sync_file
from zerocast.distributed.agreement import from_rank_0, validate_across_ranks
from zerocast.distributed.group import Group

logger = logging.getLogger(__name__)
NAME = "manifest.json"
VERSIONS = (1, 2)  # 1 has neither a step nor a hash of itself
CHUNK = 2**20
MOST_BYTES = 2**28  # of a manifest: a million files and more
LOADS = "loads a checkpoint"  # what ranks are in the middle of, if not in the same call


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and SHA-256 of a file."""

    nbytes: int
    sha256: str

    @staticmethod
    def of(path: Path) -> "FileSum":
        """Reads the whole file."""
        with open_regular(path) as stream:
            return FileSum.of_stream(stream, os.fstat(stream.fileno()).st_size)

    @staticmethod
    def of_stream(stream: BinaryIO, most: int) -> "FileSum":
        """Reads to the end, or `most` bytes and some more."""
        digest, nbytes = hashlib.sha256(), 0
        while nbytes <= most and (chunk := stream.read(CHUNK)):
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
    """Sums by file name; the formats that weights had, by parameter name; the number of the checkpoint; the torch that wrote it."""

    files: dict[str, FileSum]
    formats: dict[str, Stored] = field(default_factory=dict)
    step: int | None = None
    torch: str = torch.__version__

    @staticmethod
    def read(folder: Path) -> "Manifest | None":
        """The manifest of a checkpoint, None where there is none. ValueError for one that cannot be understood.

        A folder that is no checkpoint may hold a file of the same name that is something else.
        """
        if not (folder / ".metadata").is_file():
            return None
        try:
            return Manifest._of_file(folder / NAME)
        except FileNotFoundError:
            return None

    @staticmethod
    def of_step(folder: Path, step: int) -> "Manifest":
        """The manifest of a checkpoint that has one. ValueError where it is missing, damaged or notes another step."""
        path = folder / NAME
        try:
            manifest = Manifest._of_file(path)
        except FileNotFoundError:
            raise ValueError(
                f"{path} is missing, which each of these checkpoints has: its files cannot be checked"
            ) from None
        if manifest.step not in (step, None):
            raise ValueError(
                f"{path} is that of step {manifest.step}, in the folder of step {step}: folders were exchanged"
            )
        return manifest

    @staticmethod
    def _of_file(path: Path) -> "Manifest":
        content = read_bounded(path, MOST_BYTES)
        try:
            found = json.loads(content)
            version, own = found["version"], found.pop("sha256", None)
            files = {
                str(name): FileSum(int(sums["bytes"]), str(sums["sha256"])) for name, sums in found["files"].items()
            }
            formats = {
                str(name): Stored(str(one["format"]), str(one["dtype"]))
                for name, one in found.get("formats", {}).items()
            }
            step = None if found.get("step") is None else int(found["step"])
            manifest = Manifest(files, formats, step, str(found.get("torch", "unknown")))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {error!r}") from None
        if version not in VERSIONS:
            raise ValueError(f"{path} has version {version!r}, this zerocast reads versions up to {VERSIONS[-1]}")
        if version > 1 and own != (sums := _digest(found)):
            raise ValueError(
                f"{path} is damaged: its SHA-256 is {sums[:16]}..., and was {str(own)[:16]}... when it was written"
            )
        outside = [name for name in files if PurePath(name).name != name]
        if outside:
            raise ValueError(f"{path} is damaged: {outside[0]!r} is no file of the checkpoint")
        return manifest

    def write(self, folder: Path) -> None:
        """Into the folder, down to the disk."""
        files = {name: {"bytes": sums.nbytes, "sha256": sums.sha256} for name, sums in sorted(self.files.items())}
        formats = {name: {"format": one.format, "dtype": one.dtype} for name, one in sorted(self.formats.items())}
        content: dict[str, Any] = {
            "version": VERSIONS[-1],
            "torch": self.torch,
            "step": self.step,
            "files": files,
            "formats": formats,
        }
        with (folder / NAME).open("w") as stream:
            json.dump({**content, "sha256": _digest(content)}, stream, indent=1)
        sync_file(folder / NAME)

    def check(self, folder: Path, names: Sequence[str]) -> None:
        """ValueError, with both values, for the first of these files that is not what was written."""
        for name in names:
            path, expected = folder / name, self.files[name]
            try:
                stream = open_regular(path)
            except FileNotFoundError:
                raise ValueError(f"{path} is missing; it had {expected.nbytes:,} bytes when it was written") from None
            with stream:
                nbytes = os.fstat(stream.fileno()).st_size
                if nbytes != expected.nbytes:
                    raise ValueError(f"{path} has {nbytes:,} bytes, and had {expected.nbytes:,} when it was written")
                found = FileSum.of_stream(stream, nbytes)
            if found != expected:
                sums = f"its SHA-256 is {found.sha256[:16]}..., and was {expected.sha256[:16]}..."
                raise ValueError(f"{path} is damaged: {sums} when it was written")


def _digest(content: dict[str, Any]) -> str:
    """Of a manifest without its own hash."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, damaged or not: metadata or a manifest are there."""
    return (folder / ".metadata").is_file() or (folder / NAME).is_file()


def check_files(path: Path, group: Group) -> None:
    """ValueError on every rank if any file is not what the manifest says; each rank reads some of them.

    Without a manifest, as other programs leave a folder of torch.distributed.checkpoint, nothing is checked, and rank 0 says so.
    """
    manifest: Manifest | None = from_rank_0(group, lambda: Manifest.read(path), LOADS)
    if manifest is None and group.rank == 0 and (path / ".metadata").is_file():
        logger.warning("%s has no %s: what its files hold is not checked", path, NAME)
    _check(manifest or Manifest({}), path, group)


def check_step(path: Path, step: int, group: Group) -> None:
    """Likewise for checkpoint `step` of `zerocast.optim.Checkpoints`: the manifest must be there and be that of the step."""
    _check(from_rank_0(group, lambda: Manifest.of_step(path, step), LOADS), path, group)


def _check(manifest: Manifest, path: Path, group: Group) -> None:
    problem = None
    try:
        manifest.check(path, sorted(manifest.files)[group.rank :: group.size])
    except (OSError, ValueError) as error:
        problem = error
    validate_across_ranks(group, [], problem, what=LOADS)
