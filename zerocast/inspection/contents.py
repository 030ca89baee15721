"""Contents: what is in a checkpoint, or in any other source of masters, by what it is for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zerocast.checkpoint.sources import HIGH_PRECISION, Entry, TensorSource, open_source
from zerocast.checkpoint.sources.manifest import Manifest, Stored, check_files
from zerocast.distributed.group import ONE_PROCESS

MODEL = "model."


@dataclass(frozen=True)
class Contents:
    """A source with the names of its masters.

    `masters` maps a parameter's name to its key in the source; `other` counts (tensors, bytes) of the rest by the first part of
    its name. `manifest` is None where there is none, and then no file was checked.
    """

    source: TensorSource
    masters: Mapping[str, str]
    other: Mapping[str, tuple[int, int]]
    manifest: Manifest | None

    @staticmethod
    def of(path: Path) -> "Contents":
        """Opens what is at a path; files with hashes are compared with them first. Errors as of `open_source`."""
        manifest = Manifest.read(path)
        if manifest is not None:
            check_files(path, ONE_PROCESS)
        source = open_source(path)
        front = MODEL if any(key.startswith(MODEL) for key in source.entries) else ""
        masters = {key.removeprefix(front): key for key in source.entries if key.startswith(front)}
        other: dict[str, tuple[int, int]] = {}
        for key, entry in source.entries.items():
            if not key.startswith(front):
                kind = key.split(".")[0]
                tensors, nbytes = other.get(kind, (0, 0))
                other[kind] = tensors + 1, nbytes + nbytes_of(entry)
        return Contents(source, masters, other, manifest)

    @property
    def entries(self) -> dict[str, Entry]:
        """The masters by parameter name; what no master can be made of is left out."""
        found = {name: self.source.entries[key] for name, key in self.masters.items()}
        return {name: entry for name, entry in found.items() if entry.dtype in HIGH_PRECISION}

    @property
    def stored(self) -> Mapping[str, Stored]:
        """The formats that the optimizer had when it was saved."""
        return self.manifest.formats if self.manifest else {}

    @property
    def step(self) -> int | None:
        """How many steps were taken; None where nothing says so."""
        steps = (key for key in self.source.entries if key.startswith("optim.state.") and key.endswith(".step"))
        key = next(steps, None)
        return None if key is None else int(self.source.read(key, (), ()))

    def cast_scale(self, name: str) -> Tensor | None:
        """The scale of the live bytes of a weight with delayed scaling, f32[1]."""
        key = f"zerocast.{name}.cast_scale"
        return self.source.read(key, (0,), (1,)) if key in self.source.entries else None


def nbytes_of(entry: Entry) -> int:
    """Bytes of a tensor; 0 for a dtype that torch has not."""
    dtype = getattr(torch, entry.dtype, None)
    return entry.numel * dtype.itemsize if isinstance(dtype, torch.dtype) else 0
