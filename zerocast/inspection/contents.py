"""Contents: the masters and other tensors of a checkpoint, or of any other source of masters."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zerocast.checkpoint.manifest import Manifest, Stored, check_files
from zerocast.checkpoint.sources import HIGH_PRECISION, Entry, TensorSource, open_source
from zerocast.checkpoint.sources.safetensors_files import SafetensorsSource
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats.shared_amax import SharedAmax

MODEL = "model."
EMBEDDING = re.compile(r"emb|wte|wpe", re.IGNORECASE)


@dataclass(frozen=True)
class Contents:
    """A source and the names of its masters.

    Attributes:
        source: the opened source.
        masters: key in the source by parameter name, in the order of the model.
        other: (tensors, bytes) of all other tensors, by the first part of their names.
        manifest: None if there is none, and then no file was checked.
    """

    source: TensorSource
    masters: Mapping[str, str]
    other: Mapping[str, tuple[int, int]]
    manifest: Manifest | None

    @staticmethod
    def of(path: Path, whole_names: bool = False) -> "Contents":
        """Open a path, after comparing its files with their hashes if it has a manifest.

        Names lose the "model." that those of a checkpoint begin with; with `whole_names` those of
        safetensors are left as they are.

        Raises like `open_source`, and ValueError for a file that differs from its hash.
        """
        manifest = Manifest.read(path)
        if manifest is not None:
            check_files(path, ONE_PROCESS)
        source = open_source(path)
        entries = source.entries
        # safetensors are no checkpoint of ours: there "model." may begin some names of a model
        of_ours = all if isinstance(source, SafetensorsSource) else any
        keeps = whole_names and isinstance(source, SafetensorsSource)
        front = MODEL if entries and not keeps and of_ours(key.startswith(MODEL) for key in entries) else ""
        names = (key.removeprefix(front) for key in source.entries if key.startswith(front))
        masters = {name: f"{front}{name}" for name in sorted(names, key=_place_in_model)}
        other: dict[str, tuple[int, int]] = {}
        for key, entry in source.entries.items():
            if not key.startswith(front):
                kind = key.split(".")[0]
                tensors, nbytes = other.get(kind, (0, 0))
                other[kind] = tensors + 1, nbytes + nbytes_of(entry)
        return Contents(source, masters, other, manifest)

    @property
    def entries(self) -> dict[str, Entry]:
        """The masters by parameter name, without those of dtypes that FP32 cannot hold."""
        found = {name: self.source.entries[key] for name, key in self.masters.items()}
        return {name: entry for name, entry in found.items() if entry.dtype in HIGH_PRECISION}

    @property
    def stored(self) -> Mapping[str, Stored]:
        """The formats that the weights had when the checkpoint was saved."""
        return self.manifest.formats if self.manifest else {}

    def shared_amaxes(self, names: Iterable[str]) -> dict[str, SharedAmax]:
        """The weights of a run that shared a tensor amax, among these."""
        chosen = {name: SharedAmax(self.stored[name].shares) for name in names if name in self.stored}
        return {name: shared for name, shared in chosen.items() if shared.names}

    @property
    def step(self) -> int | None:
        """The number of optimizer steps taken, or None if the source has no such record."""
        steps = (key for key in self.source.entries if key.startswith("optim.state.") and key.endswith(".step"))
        key = next(steps, None)
        return None if key is None else int(self.source.read(key, (), ()))

    def cast_scale(self, name: str) -> Tensor | None:
        """f32[1], the scale of the last cast of a weight with delayed scaling; None if not
        stored.
        """
        key = f"zerocast.{name}.cast_scale"
        return self.source.read(key, (0,), (1,)) if key in self.source.entries else None


def _place_in_model(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """Embeddings, then blocks by number, then what follows them: files are sorted by letter."""
    parts = [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
    is_numbered = len(parts) > 1
    return (not is_numbered and EMBEDDING.search(name) is None), parts if is_numbered else [(-1, ""), *parts]


def nbytes_of(entry: Entry) -> int:
    """The size of a tensor in bytes; 0 for a dtype that torch lacks."""
    dtype = getattr(torch, entry.dtype, None)
    return entry.numel * dtype.itemsize if isinstance(dtype, torch.dtype) else 0
