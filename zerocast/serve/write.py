"""Write the tensors of a source as safetensors files into a folder that appears complete.

Weights are encoded and written one by one. If ranks share the source, rank 0 writes: each batch is
written before the next one is gathered, and an error on rank 0 is raised on every rank.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from zerocast.checkpoint.whole_folder import WholeFolder, sync_file
from zerocast.distributed.agreement import from_rank_0
from zerocast.distributed.group import Group
from zerocast.serve.fused_amaxes import FusedAmaxes
from zerocast.serve.namings import check_naming, layout_of
from zerocast.serve.piece import Piece, whole
from zerocast.serve.stored_tensor import of_plain, of_weight
from zerocast.serve.weight_source import Batch, WeightSource
from zerocast.weight import QuantizedWeight

INDEX = "model.safetensors.index.json"
# The default size of a file.
SHARD_BYTES = 5 * 10**9

# Returns the pieces of a tensor from its name and shape.
Pieces = Callable[[str, Sequence[int]], Sequence[Piece]]
Plain = Callable[[str, Tensor], Tensor]


class SafetensorsWriter:
    """Writes numbered safetensors files with an index into a folder, with one file in memory.

    Tensors that are added in one call are in one file. A file has at most `shard_bytes` bytes,
    unless the tensors of a single call have more.
    """

    def __init__(self, folder: Path, naming: str, shard_bytes: int) -> None:
        self._folder = folder
        self._naming = naming
        self._shard_bytes = shard_bytes
        # The tensors of the next file, in host memory, and their bytes.
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        # The number of files so far, the file of each tensor by name, and the bytes of all.
        self._files = 0
        self._file_of: dict[str, int] = {}
        self._total_bytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors to the host, and write a file when it is full. ValueError for a name that
        was added before.
        """
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if self._pending and self._pending_bytes + nbytes > self._shard_bytes:
            self._flush()
        for name, tensor in tensors.items():
            if name in self._pending or name in self._file_of:
                raise ValueError(f"two tensors are called {name}")
            # safetensors refuses two views of one storage, so each tensor is copied.
            self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += nbytes

    def close(self) -> list[str]:
        """Write the last file and the index. Returns the names of all files, the index last."""
        if self._pending or not self._files:
            self._flush()
        # The names have the number of files, which is known only now.
        names = {n: f"model-{n:05d}-of-{self._files:05d}.safetensors" for n in range(1, self._files + 1)}
        for number, name in names.items():
            self._temporary(number).rename(self._folder / name)
        weight_map = {name: names[number] for name, number in sorted(self._file_of.items())}
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._folder / INDEX).write_text(json.dumps(index, indent=1))
        sync_file(self._folder / INDEX)
        return [*names.values(), INDEX]

    def _temporary(self, number: int) -> Path:
        return self._folder / f"model-{number:05d}.safetensors"

    def _flush(self) -> None:
        from safetensors.torch import save_file  # noqa: PLC0415

        self._files += 1
        save_file(self._pending, self._temporary(self._files), metadata={"format": "pt", "naming": self._naming})
        sync_file(self._temporary(self._files))
        self._file_of |= dict.fromkeys(self._pending, self._files)
        self._total_bytes += self._pending_bytes
        self._pending = {}
        self._pending_bytes = 0


def write(
    source: WeightSource,
    folder: Path,
    naming: str,
    shard_bytes: int,
    pieces: Pieces,
    finish: Callable[[Path], Sequence[str]] = lambda _: (),
    plain: Plain = lambda _, tensor: tensor,
    allow_unequal_scales: bool = True,
) -> list[Path]:
    """Write the pieces of each tensor of a source into a folder that appears complete.

    `plain` converts tensors that are not quantized; `finish` adds files to the folder before it
    appears, and returns their names. Unequal scales of weights that engines fuse are logged, or
    raise. An error on one rank of the source raises on all.
    """
    check_naming(naming)
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be at least 1, got {shard_bytes}")
    check_pieces(source, naming, pieces)
    # Absolute, since the partial folder is written beside this one and named after it, and "." has
    # no name.
    whole_folder = WholeFolder(folder.absolute())
    writer = SafetensorsWriter(whole_folder.partial, naming, shard_bytes)
    fused = FusedAmaxes(naming, allow_unequal_scales)
    _on_rank_0(source.group, lambda: _begin(whole_folder))
    try:
        for batch in source.batches():
            _on_rank_0(source.group, partial(_add, writer, batch, naming, pieces, plain, fused))
        _on_rank_0(source.group, fused.check)
        names = _on_rank_0(source.group, lambda: _finish(whole_folder, writer, finish))
    except BaseException:
        if source.group.rank == 0:
            whole_folder.abandon()
        raise
    return [whole_folder.path / name for name in names]


def write_safetensors(
    source: WeightSource, folder: Path, naming: str = "bf16", shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write the tensors of a source, each whole and under its own name, without a config."""
    return write(source, folder, naming, shard_bytes, lambda name, shape: [whole(name, shape)])


def _on_rank_0(group: Group, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 while the others wait; its error is raised on every rank."""
    return work() if group.size == 1 else from_rank_0(group, work, "exports")


def _begin(folder: WholeFolder) -> None:
    if folder.holds_anything():
        raise ValueError(f"{folder.path} is not empty: export into a new folder")
    folder.begin()


def _finish(folder: WholeFolder, writer: SafetensorsWriter, finish: Callable[[Path], Sequence[str]]) -> list[str]:
    names = [*finish(folder.partial), *writer.close()]
    folder.commit()
    return names


def check_pieces(source: WeightSource, naming: str, pieces: Pieces) -> None:
    """ValueError for a weight that the naming cannot express, before anything is read."""
    for name, fmt in source.formats.items():
        if naming == "bf16":
            break
        layout_of(naming, name, fmt)
        for piece in pieces(name, source.shapes[name]):
            if len(piece.shape) != 2:
                raise ValueError(
                    f"{piece.name} has shape {piece.shape}, and readers of quantized weights know matrices alone: "
                    "zerocast.export.export_hf writes experts one by one where the model's own mapping says how, or export "
                    "it as bf16"
                )


def _add(
    writer: SafetensorsWriter, batch: Batch, naming: str, pieces: Pieces, plain: Plain, fused: FusedAmaxes
) -> None:
    for name, tensor in batch:
        tensor_pieces = pieces(name, tensor.shape)
        if isinstance(tensor, QuantizedWeight):
            stored = of_weight(tensor, naming, name, tensor_pieces)
            fused.note(name, tensor, tensor_pieces)
        else:
            value = plain(name, tensor)
            stored = of_plain(value, tensor_pieces, value.dtype)
        writer.add({entry.name: entry.make() for entry in stored})
