"""Write the tensors of a source into a folder that appears complete.

Weights are encoded and written one by one. If ranks share the source, rank 0 writes: each batch is
written before the next one is gathered, and an error on rank 0 is raised on every rank.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from zerocast.checkpoint.whole_folder import WholeFolder
from zerocast.distributed.agreement import from_rank_0
from zerocast.distributed.group import Group
from zerocast.serve.fused_amaxes import FusedAmaxes
from zerocast.serve.namings import check_naming, layout_of
from zerocast.serve.piece import Piece, whole
from zerocast.serve.safetensors_writer import SHARD_BYTES, SafetensorsWriter
from zerocast.serve.stored_tensor import of_plain, of_weight
from zerocast.serve.weight_source import Batch, WeightSource
from zerocast.weight import QuantizedWeight

# Returns the pieces of a tensor from its name and shape.
Pieces = Callable[[str, Sequence[int]], Sequence[Piece]]
Plain = Callable[[str, Tensor], Tensor]


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
    at = WholeFolder(folder.absolute())
    writer, fused = SafetensorsWriter(at.partial, naming, shard_bytes), FusedAmaxes(naming, allow_unequal_scales)
    _on_rank_0(source.group, lambda: _begin(at))
    try:
        for batch in source.batches():
            _on_rank_0(source.group, partial(_add, writer, batch, naming, pieces, plain, fused))
        _on_rank_0(source.group, fused.check)
        names = _on_rank_0(source.group, lambda: _finish(at, writer, finish))
    except BaseException:
        if source.group.rank == 0:
            at.abandon()
        raise
    return [at.path / name for name in names]


def write_safetensors(
    source: WeightSource, folder: Path, naming: str = "bf16", shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write the tensors of a source, each whole and under its own name, without a config."""
    return write(source, folder, naming, shard_bytes, lambda name, shape: [whole(name, shape)])


def _on_rank_0(group: Group, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 while the others wait; its error is raised on every rank."""
    return work() if group.size == 1 else from_rank_0(group, work, "exports")


def _begin(at: WholeFolder) -> None:
    if at.holds_anything():
        raise ValueError(f"{at.path} is not empty: export into a new folder")
    at.begin()


def _finish(at: WholeFolder, writer: SafetensorsWriter, finish: Callable[[Path], Sequence[str]]) -> list[str]:
    names = [*finish(at.partial), *writer.close()]
    at.commit()
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
        parts = pieces(name, tensor.shape)
        if isinstance(tensor, QuantizedWeight):
            stored = of_weight(tensor, naming, name, parts)
            fused.note(name, tensor, parts)
        else:
            value = plain(name, tensor)
            stored = of_plain(value, parts, value.dtype)
        writer.add({entry.name: entry.make() for entry in stored})
