"""SafetensorsWriter: numbered files of bounded size with an index, one file in memory."""

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from zerocast.checkpoint.whole_folder import sync_file

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # most bytes in a file, unless the caller says otherwise


class SafetensorsWriter:
    """Writes into `folder`. What is added together lies in one file; a file has at most
    `shard_bytes` bytes, unless what is added at once is larger.
    """

    def __init__(self, folder: Path, naming: str, shard_bytes: int) -> None:
        self._folder, self._naming, self._shard_bytes = folder, naming, shard_bytes
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._files = 0
        self._places: dict[str, int] = {}  # the number of its file by name
        self._total = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors to the host, and write a file when it is full. ValueError for a name that
        was added before.
        """
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if self._held and self._held_bytes + nbytes > self._shard_bytes:
            self._flush()
        for name, tensor in tensors.items():
            if name in self._held or name in self._places:
                raise ValueError(f"two tensors are called {name}")
            # safetensors takes no two views of one storage
            self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._held_bytes += nbytes

    def close(self) -> list[str]:
        """Write what is left, and the index; returns the names of the files, the index last."""
        if self._held or not self._files:
            self._flush()
        names = {n: f"model-{n:05d}-of-{self._files:05d}.safetensors" for n in range(1, self._files + 1)}
        for number, name in names.items():
            self._temporary(number).rename(self._folder / name)
        places = {name: names[number] for name, number in sorted(self._places.items())}
        index = {"metadata": {"total_size": self._total}, "weight_map": places}
        (self._folder / INDEX).write_text(json.dumps(index, indent=1))
        sync_file(self._folder / INDEX)
        return [*names.values(), INDEX]

    def _temporary(self, number: int) -> Path:
        return self._folder / f"model-{number:05d}.safetensors"

    def _flush(self) -> None:
        from safetensors.torch import save_file  # noqa: PLC0415

        self._files += 1
        save_file(self._held, self._temporary(self._files), metadata={"format": "pt", "naming": self._naming})
        sync_file(self._temporary(self._files))
        self._places |= dict.fromkeys(self._held, self._files)
        self._total += self._held_bytes
        self._held, self._held_bytes = {}, 0
