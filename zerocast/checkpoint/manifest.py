"""Manifest: sizes and hashes of the files of a checkpoint, by which damage is found before loading.

The manifest is written last. It detects disk errors, broken transfers (its own too, by a hash of
itself) and folders whose names were exchanged. It does not detect somebody who rewrites it as well;
loading runs no code in any case (`safe_reader.py`). `zerocast.optim.Checkpoints` always writes one
and requires it; folders of other programs have none and are loaded unchecked.

It also says what no tensor can: from which checkpoint this one descends, plain values of the
caller, and what it leaves out.
"""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import torch

from zerocast.checkpoint.lineage import Lineage
from zerocast.checkpoint.regular_file import open_regular, read_bounded
from zerocast.checkpoint.whole_folder import MANIFEST, sync_file
from zerocast.distributed.agreement import from_rank_0, validate_across_ranks
from zerocast.distributed.group import Group

logger = logging.getLogger(__name__)
NAME = MANIFEST
CHUNK = 2**20
MOST_BYTES = 2**28  # of a manifest, enough for a million files
LOADS = "loads a checkpoint"  # the call, as errors name it when ranks make different ones


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and SHA-256 of a file."""

    nbytes: int
    sha256: str

    @staticmethod
    def of(path: Path) -> "FileSum":
        """The sum of a whole file; ValueError if it is no regular file."""
        with open_regular(path) as stream:
            return FileSum.of_stream(stream, os.fstat(stream.fileno()).st_size)

    @staticmethod
    def of_stream(stream: BinaryIO, most: int) -> "FileSum":
        """The sum of a stream, which is read to its end or to a little more than `most` bytes."""
        digest, nbytes = hashlib.sha256(), 0
        while nbytes <= most and (chunk := stream.read(CHUNK)):
            digest.update(chunk)
            nbytes += len(chunk)
        return FileSum(nbytes, digest.hexdigest())


@dataclass(frozen=True)
class Stored:
    """Format and nominal dtype that a weight had, as text, and the names of the weights that it
    shared its tensor amax with; loading masters ignores them.
    """

    format: str
    dtype: str
    shares: tuple[str, ...] = ()

    def content(self) -> dict[str, Any]:
        """The entry of a manifest."""
        shares = {"shares": list(self.shares)} if self.shares else {}
        return {"format": self.format, "dtype": self.dtype, **shares}


@dataclass(frozen=True)
class Manifest:
    """Sums by file name, and what a checkpoint says of itself.

    Attributes:
        formats: of quantized weights, by parameter name.
        step: the training step.
        lineage: which checkpoint this is, and which it descends from.
        values: values of `extra` that are no tensors, one for all ranks.
        values_of_ranks: those that ranks have each for themselves.
        frozen: the names of parameters without a master.
        left_out: what training reads and the checkpoint does not hold, in words.
        torch: the version that wrote it.
    """

    files: dict[str, FileSum] = field(default_factory=dict)
    formats: dict[str, Stored] = field(default_factory=dict)
    step: int | None = None
    lineage: Lineage = field(default_factory=Lineage)
    values: dict[str, Any] = field(default_factory=dict)
    values_of_ranks: tuple[dict[str, Any], ...] = ()
    frozen: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    torch: str = torch.__version__

    @staticmethod
    def read(folder: Path) -> "Manifest | None":
        """The manifest of a checkpoint, or None if it has none; ValueError for a damaged one.

        A folder that is no checkpoint may hold an unrelated file of the same name.
        """
        if not (folder / ".metadata").is_file():
            return None
        try:
            return Manifest._of_file(folder / NAME)
        except FileNotFoundError:
            return None

    @staticmethod
    def of_step(folder: Path, step: int) -> "Manifest":
        """The manifest of a checkpoint of `step`; ValueError if it is missing, damaged or of
        another step.
        """
        path = folder / NAME
        try:
            manifest = Manifest._of_file(path)
        except FileNotFoundError:
            raise ValueError(
                f"{path} is missing, which each of these checkpoints has: its files cannot be checked"
            ) from None
        if manifest.step != step:
            raise ValueError(
                f"{path} is that of step {manifest.step}, in the folder of step {step}: folders were exchanged"
            )
        return manifest

    @staticmethod
    def _of_file(path: Path) -> "Manifest":
        content = read_bounded(path, MOST_BYTES)
        try:
            found = json.loads(content)
            own = found.pop("sha256", None)
            manifest = Manifest._of_content(found)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {error!r}") from None
        if own != (sums := digest(found)):
            raise ValueError(
                f"{path} is damaged: its SHA-256 is {sums[:16]}..., and was {str(own)[:16]}... when it was written"
            )
        outside = [name for name in manifest.files if PurePath(name).name != name]
        if outside:
            raise ValueError(f"{path} is damaged: {outside[0]!r} is no file of the checkpoint")
        return manifest

    @staticmethod
    def _of_content(found: dict[str, Any]) -> "Manifest":
        files = {str(name): FileSum(int(sums["bytes"]), str(sums["sha256"])) for name, sums in found["files"].items()}
        formats = {
            str(name): Stored(str(one["format"]), str(one["dtype"]), tuple(map(str, one.get("shares", ()))))
            for name, one in found["formats"].items()
        }
        step = None if found["step"] is None else int(found["step"])
        line = found["lineage"]
        lineage = Lineage(str(line["id"]), int(line["number"]), tuple(map(str, line["ancestors"])))
        values, of_ranks = dict(found["values"]), tuple(map(dict, found["values_of_ranks"]))
        frozen, left_out = (tuple(map(str, found[key])) for key in ("frozen", "left_out"))
        return Manifest(files, formats, step, lineage, values, of_ranks, frozen, left_out, str(found["torch"]))

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder and sync it."""
        files = {name: {"bytes": sums.nbytes, "sha256": sums.sha256} for name, sums in sorted(self.files.items())}
        formats = {name: one.content() for name, one in sorted(self.formats.items())}
        content: dict[str, Any] = {
            "torch": self.torch,
            "step": self.step,
            "lineage": asdict(self.lineage),
            "files": files,
            "formats": formats,
            "values": self.values,
            "values_of_ranks": self.values_of_ranks,
            "frozen": self.frozen,
            "left_out": self.left_out,
        }
        with (folder / NAME).open("w") as stream:
            json.dump({**content, "sha256": digest(content)}, stream, indent=1)
        sync_file(folder / NAME)

    def check(self, folder: Path, names: Sequence[str]) -> None:
        """Raise ValueError, with both values, for the first of these files that differs from its
        sum.
        """
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


def digest(content: dict[str, Any]) -> str:
    """The SHA-256 of a manifest without its own hash."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_checkpoint(folder: Path) -> bool:
    """True if a folder is a checkpoint, perhaps damaged: it has metadata or a manifest."""
    return (folder / ".metadata").is_file() or (folder / NAME).is_file()


def check_files(path: Path, group: Group) -> Manifest:
    """The manifest, an empty one where there is none. ValueError on every rank if a file differs
    from it; ranks share the work.

    A folder of another program has no manifest; rank 0 then logs that nothing is checked.
    """
    manifest: Manifest | None = from_rank_0(group, lambda: Manifest.read(path), LOADS)
    if manifest is None and group.rank == 0 and (path / ".metadata").is_file():
        logger.warning("%s has no %s: what its files hold is not checked", path, NAME)
    return _check(manifest or Manifest(), path, group)


def check_step(path: Path, step: int, group: Group) -> Manifest:
    """Like `check_files`, for a folder of `Checkpoints`: the manifest must exist and name this
    step.
    """
    return _check(from_rank_0(group, lambda: Manifest.of_step(path, step), LOADS), path, group)


def _check(manifest: Manifest, path: Path, group: Group) -> Manifest:
    problem = None
    try:
        manifest.check(path, sorted(manifest.files)[group.rank :: group.size])
    except (OSError, ValueError) as error:
        problem = error
    validate_across_ranks(group, [], problem, what=LOADS)
    return manifest
