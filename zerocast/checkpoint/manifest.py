"""Manifest: sizes and hashes of the files of a checkpoint, to find damage before anything is
loaded.

The manifest is written last. It detects disk errors, broken transfers (of the manifest itself, too,
by a hash of it) and folders whose names were exchanged. It does not detect an attacker who rewrites
the manifest as well; loading runs no code in any case (`sources/dcp.py`).
`zerocast.optim.Checkpoints` always writes a manifest and requires it. Folders of other programs
have no manifest and are loaded unchecked.

The manifest also has the data that are not tensors: the ids of the checkpoints that this one
descends from, plain values of the caller, and a description of the state that is not saved.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import IO, Any

import torch

from zerocast.checkpoint.lineage import Lineage
from zerocast.checkpoint.store import Location, StorePath, open_regular, read_bounded, size_of
from zerocast.checkpoint.whole_folder import MANIFEST, has_manifest, is_unfinished, sync
from zerocast.distributed.agreement import from_rank_0, validate_across_ranks
from zerocast.distributed.group import Group

logger = logging.getLogger(__name__)
NAME = MANIFEST
CHUNK = 2**20
# The largest manifest that is read, enough for a million files.
MAX_BYTES = 2**28
# The names of calls in the error that is raised if ranks make different ones.
SAVES = "saves a checkpoint"
LOADS = "loads a checkpoint"


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and SHA-256 of a file."""

    nbytes: int
    sha256: str

    @staticmethod
    def of_stream(stream: IO[bytes], most: int) -> "FileSum":
        """Return the sum of a stream, which is read to its end or to a little more than `most`
        bytes.
        """
        digest, nbytes = hashlib.sha256(), 0
        while nbytes <= most and (chunk := stream.read(CHUNK)):
            digest.update(chunk)
            nbytes += len(chunk)
        return FileSum(nbytes, digest.hexdigest())


@dataclass(frozen=True)
class Stored:
    """Format and nominal dtype of a quantized weight, as text, and the names of the weights that
    share its tensor amax. A load of masters does not need them.
    """

    format: str
    dtype: str
    shares: tuple[str, ...] = ()

    def content(self) -> dict[str, Any]:
        """Return the entry of a manifest."""
        shares = {"shares": list(self.shares)} if self.shares else {}
        return {"format": self.format, "dtype": self.dtype, **shares}


@dataclass(frozen=True)
class Manifest:
    """The contents of the file `manifest.json` of a checkpoint.

    Attributes:
        files: size and hash of each file keyed by name.
        formats: formats of quantized weights keyed by parameter name.
        step: the training step.
        lineage: the id of this checkpoint and the ids of its ancestors.
        values: values of `extra`, keyed by name, that are not tensors and are equal on all ranks.
        values_of_ranks: for each rank, the values of `extra` that differ between ranks.
        frozen: the names of parameters without a master.
        left_out: descriptions of state that training reads and the checkpoint does not have.
        torch: the version of torch that wrote the checkpoint.
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
    def read(folder: Location) -> "Manifest | None":
        """Return the manifest of a checkpoint, or None if it has none. Raises ValueError for a
        damaged manifest, and for a folder of a store without one.

        A folder that is not a checkpoint may hold an unrelated file of the same name.
        """
        is_store = isinstance(folder, StorePath)
        if not is_store and not (folder / ".metadata").is_file():
            return None
        if is_unfinished(folder):
            raise ValueError(f"{folder} is incomplete: a save is in progress or was interrupted")
        try:
            return Manifest._of_file(folder / NAME)
        except FileNotFoundError:
            if not is_store or not folder.exists():
                return None
            raise ValueError(
                f"{folder} has no {NAME}, which marks a complete checkpoint at a URL: copy files of other programs to a local "
                "folder to read them"
            ) from None

    @staticmethod
    def of_step(folder: Location, step: int) -> "Manifest":
        """Return the manifest of a checkpoint of `step`. Raises ValueError if it is missing,
        damaged or has a different step.
        """
        path = folder / NAME
        try:
            manifest = Manifest._of_file(path)
        except FileNotFoundError:
            raise ValueError(f"{path} is missing, so the files of the checkpoint cannot be checked") from None
        if manifest.step != step:
            raise ValueError(f"{path} has step {manifest.step}, expected {step}: folders were exchanged")
        return manifest

    @staticmethod
    def _of_file(path: Location) -> "Manifest":
        content = read_bounded(path, MAX_BYTES)
        try:
            fields = json.loads(content)
            recorded = fields.pop("sha256", None)
            manifest = Manifest._of_fields(fields)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {error!r}") from None
        if recorded != (actual := digest(fields)):
            raise ValueError(
                f"{path} is damaged: its SHA-256 is {actual[:16]}..., and was {str(recorded)[:16]}... when it was written"
            )
        outside = [name for name in manifest.files if PurePath(name).name != name]
        if outside:
            raise ValueError(f"{path} is damaged: {outside[0]!r} is not a file of the checkpoint")
        return manifest

    @staticmethod
    def _of_fields(fields: dict[str, Any]) -> "Manifest":
        """Return a manifest from parsed JSON. Raises KeyError, TypeError or ValueError if it is not
        a manifest.
        """
        files = {str(name): FileSum(int(sums["bytes"]), str(sums["sha256"])) for name, sums in fields["files"].items()}
        formats = {
            str(name): Stored(str(entry["format"]), str(entry["dtype"]), tuple(map(str, entry.get("shares", ()))))
            for name, entry in fields["formats"].items()
        }
        lineage = fields["lineage"]
        return Manifest(
            files=files,
            formats=formats,
            step=None if fields["step"] is None else int(fields["step"]),
            lineage=Lineage(str(lineage["id"]), int(lineage["number"]), tuple(map(str, lineage["ancestors"]))),
            values=dict(fields["values"]),
            values_of_ranks=tuple(map(dict, fields["values_of_ranks"])),
            frozen=tuple(map(str, fields["frozen"])),
            left_out=tuple(map(str, fields["left_out"])),
            torch=str(fields["torch"]),
        )

    def write(self, folder: Location) -> None:
        """Write the manifest into a folder and sync it."""
        files = {name: {"bytes": sums.nbytes, "sha256": sums.sha256} for name, sums in sorted(self.files.items())}
        formats = {name: stored.content() for name, stored in sorted(self.formats.items())}
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
        (folder / NAME).write_text(json.dumps({**content, "sha256": digest(content)}, indent=1))
        sync(folder / NAME)

    def check(self, folder: Location, names: Sequence[str]) -> None:
        """Raise ValueError, with both values, for the first of these files whose size or hash
        differs from the recorded one.
        """
        for name in names:
            path, expected = folder / name, self.files[name]
            try:
                stream = open_regular(path)
            except FileNotFoundError:
                raise ValueError(f"{path} is missing; it had {expected.nbytes:,} bytes when it was written") from None
            with stream:
                nbytes = size_of(path, stream)
                if nbytes != expected.nbytes:
                    raise ValueError(f"{path} has {nbytes:,} bytes, and had {expected.nbytes:,} when it was written")
                actual = FileSum.of_stream(stream, nbytes)
            if actual != expected:
                sums = f"its SHA-256 is {actual.sha256[:16]}..., and was {expected.sha256[:16]}..."
                raise ValueError(f"{path} is damaged: {sums} when it was written")


def digest(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own hash."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_checkpoint(folder: Location) -> bool:
    """Return True if a folder is a checkpoint, possibly damaged: it has metadata or a manifest, and
    no save into it is unfinished.
    """
    return ((folder / ".metadata").is_file() or has_manifest(folder)) and not is_unfinished(folder)


def check_files(path: Location, group: Group) -> Manifest:
    """Compare the files of a folder with its manifest, which is returned. Collective: each rank
    checks a part of the files. Raises ValueError on every rank if a file differs.

    A local folder of another program has no manifest. Rank 0 then logs that nothing is checked, and
    the result is empty. In a store the manifest marks a complete checkpoint, so a folder without it
    raises ValueError.
    """
    manifest: Manifest | None = from_rank_0(group, lambda: Manifest.read(path), LOADS)
    if manifest is None and group.rank == 0 and (path / ".metadata").is_file():
        logger.warning("%s has no %s: its files are not checked", path, NAME)
    return _check(manifest or Manifest(), path, group)


def check_step(path: Location, step: int, group: Group) -> Manifest:
    """Compare the files of a checkpoint of `Checkpoints` with its manifest, which is returned and
    must exist and have this step. Collective. Raises ValueError on every rank if a file differs.
    """
    return _check(from_rank_0(group, lambda: Manifest.of_step(path, step), LOADS), path, group)


def _check(manifest: Manifest, path: Location, group: Group) -> Manifest:
    problem = None
    try:
        manifest.check(path, sorted(manifest.files)[group.rank :: group.size])
    except (OSError, ValueError) as error:
        problem = error
    validate_across_ranks(group, [], problem, what=LOADS)
    return manifest
