"""Write the tensors of a source as safetensors files into a folder that appears complete.

If several ranks write, they agree on a plan before the first byte. Each then writes its files while
batches come, and the first rank adds the index. They agree before and after each batch, and an
error on one rank is raised on every rank.

Weights that an engine fuses into one matrix need the same global scale, which is checked here too.
vLLM concatenates query, key and value, and gate and up. It takes the largest of their stored global
scales and does not rescale the codes of the others (`vllm/model_executor/layers/quantization/`:
`compressed_tensors/schemes/compressed_tensors_w4a16_nvfp4.py`, `modelopt.py`).
"""

import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from zerocast.checkpoint.store import AnyPath, Location, as_location
from zerocast.checkpoint.store_folder import folder_at
from zerocast.checkpoint.whole_folder import Folder, check_written, sync
from zerocast.distributed.agreement import each_together, from_rank_0, range_over_ranks, together, validate_across_ranks
from zerocast.distributed.group import Group
from zerocast.formats import FormatSpec
from zerocast.formats.readers import FUSED
from zerocast.formats.shared_amax import SharedAmax, groups_of
from zerocast.serve.export_files import ExportPlan, FileLayout, PlainDtype, SafetensorsFile, planned_units
from zerocast.serve.flat_bytes import digest
from zerocast.serve.namings import check_naming, layout_of, unpadded
from zerocast.serve.stored_tensor import Piece, StoredTensor, of_plain, of_weight, plain_value, whole
from zerocast.serve.weight_source import Batch, WeightSource
from zerocast.weight import QuantizedWeight

INDEX = "model.safetensors.index.json"
# The default size of a file.
SHARD_BYTES = 5 * 10**9
# The name of the call in the error that is raised if ranks make different calls.
EXPORTS = "exports"


@dataclass(frozen=True)
class Contents:
    """The names and dtypes of an export, and the files in addition to its tensors.

    Attributes:
        pieces: the stored pieces of each tensor of the source, by name.
        plain_dtype: the dtypes of tensors that are not quantized.
        files: the contents of other files by name.
    """

    pieces: Mapping[str, Sequence[Piece]]
    plain_dtype: PlainDtype
    files: Mapping[str, bytes]


class TensorWriter:
    """Writes this rank's files of an export. A file is open from its first tensor to its last."""

    def __init__(self, folder: Location, naming: str, contents: Contents, files: Sequence[FileLayout]) -> None:
        self._folder = folder
        self._naming = naming
        self._contents = contents
        self._files = files
        # Tensors that are yet to be written, and their files, by name.
        self._planned = {tensor.name: (tensor, layout) for layout in files for tensor in layout.tensors}
        # By name of the file.
        self._open: dict[str, SafetensorsFile] = {}

    def add(self, batch: Batch, fused: "FusedAmaxes", check_unchanged: Callable[[], None]) -> None:
        """Write those tensors of a batch that belong to this rank. Raises RuntimeError if weights
        have changed since the first batch.
        """
        for name, tensor in batch:
            pieces = self._contents.pieces[name]
            if isinstance(tensor, QuantizedWeight) and tensor.format.element is not None:
                fused.note(name, tensor, pieces)
                stored = of_weight(tensor, self._naming, name, pieces)
            else:
                value = plain_value(tensor)
                stored = of_plain(value, pieces, self._contents.plain_dtype(name, value.dtype))
            for entry in stored:
                if entry.name in self._planned:
                    self._write(entry)
        check_unchanged()

    def close(self) -> None:
        """Write files without tensors. Raises RuntimeError if a tensor is missing."""
        if self._planned:
            raise RuntimeError(
                f"{next(iter(self._planned))} is missing, one of {len(self._planned)} tensors that no batch had"
            )
        for layout in self._files:
            if not layout.tensors:
                SafetensorsFile(self._folder, layout).close()

    def abandon(self) -> None:
        """Close files that are incomplete."""
        for file in self._open.values():
            file.abandon()

    def _write(self, entry: StoredTensor) -> None:
        planned, layout = self._planned.pop(entry.name)
        if (entry.dtype, entry.shape) != (planned.dtype, planned.shape):
            raise RuntimeError(
                f"{entry.name} is {entry.dtype} {list(entry.shape)}, and {planned.dtype} {list(planned.shape)} was planned"
            )
        if layout.name not in self._open:
            self._open[layout.name] = SafetensorsFile(self._folder, layout)
        file = self._open[layout.name]
        file.write(entry.name, entry.make())
        if file.is_complete:
            del self._open[layout.name]
            file.close()


def write(
    source: WeightSource,
    folder: AnyPath,
    naming: str,
    shard_bytes: int,
    prepare: Callable[[], Contents],
    allow_unequal_scales: bool = True,
) -> list[Location]:
    """Write the pieces of each tensor of a source into a folder that appears complete.

    `prepare` returns the contents, or raises for a source that cannot be written. Unequal scales of
    weights that engines fuse are logged, or raise. All ranks of the source call this; an error on
    one of them raises on all. Returns the paths of all files, the index last.
    """
    group = source.group
    contents, plan = _agreed(source, naming, shard_bytes, prepare)
    token = group.broadcast_object(secrets.token_hex(8), "the name of a temporary folder")
    # Absolute, since the partial folder is written beside this one and named after it, and "." has
    # no name.
    target = together(group, lambda: folder_at(as_location(folder).absolute(), token), EXPORTS)
    fused = FusedAmaxes(naming, allow_unequal_scales)
    partial_folder = _on_rank_0(group, partial(_begin, target))
    writer = TensorWriter(partial_folder, naming, contents, plan.files_of(group.rank))
    check_unchanged: Callable[[], None] | None = None
    try:
        for batch in each_together(group, source.batches(), EXPORTS):
            check_unchanged = check_unchanged or source.watch()
            together(group, partial(writer.add, batch, fused, check_unchanged), EXPORTS)
            _check_same(group, batch)
        together(group, writer.close, EXPORTS)
        _on_rank_0(group, fused.check)
        _on_rank_0(group, partial(_finish, target, plan, contents.files))
    except BaseException:
        writer.abandon()
        if group.rank == 0:
            target.abandon()
        raise
    return [target.path / name for name in (*contents.files, *(file.name for file in plan.files), INDEX)]


def write_safetensors(source: WeightSource, folder: AnyPath, naming: str, shard_bytes: int) -> list[Location]:
    """Write the tensors of a source, each whole and under its own name, without a config."""

    def prepare() -> Contents:
        pieces = {name: [whole(name, shape)] for name, shape in source.shapes.items()}
        return Contents(pieces, plain_dtype=lambda _, own: own, files={})

    return write(source, folder, naming, shard_bytes, prepare)


def check_pieces(source: WeightSource, naming: str, pieces: Mapping[str, Sequence[Piece]]) -> None:
    """Raise ValueError for a weight that the naming cannot express, before anything is read."""
    for name, fmt in source.formats.items():
        if naming == "bf16":
            break
        layout_of(naming, name, fmt)
        for piece in pieces[name]:
            if len(piece.shape) != 2:
                raise ValueError(
                    f"{piece.name} has shape {piece.shape}, and readers of quantized weights know matrices only: "
                    "zerocast.export.export_hf writes experts one at a time where the model's own mapping says how, or export "
                    "it as bf16"
                )


def _agreed(
    source: WeightSource, naming: str, shard_bytes: int, prepare: Callable[[], Contents]
) -> tuple[Contents, ExportPlan]:
    """Return the contents and the plan, which are the same on all ranks of the source."""

    def work() -> tuple[Contents, ExportPlan]:
        check_naming(naming)
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes must be at least 1, got {shard_bytes}")
        contents = prepare()
        check_pieces(source, naming, contents.pieces)
        units = list(planned_units(source, naming, contents.pieces, contents.plain_dtype))
        return contents, ExportPlan.build(units, source.group.size, shard_bytes, naming)

    contents, plan = together(source.group, work, EXPORTS)
    settings = {name: hashlib.sha256(content).hexdigest()[:16] for name, content in contents.files.items()}
    validate_across_ranks(source.group, plan.lines, None, EXPORTS, {"naming": naming, **settings})
    return contents, plan


def _check_same(group: Group, batch: Batch) -> None:
    """Raise ValueError on all ranks for a tensor whose values differ between ranks, of which an
    export would have one rank's. Collective.
    """
    if group.size == 1 or not batch:
        return
    # The negative of a number of 63 bits is an int64 too.
    digests = together(group, lambda: [_digest(tensor) >> 1 for _, tensor in batch], EXPORTS)
    smallest, largest = range_over_ranks(group, digests, "digests of what is exported")
    for (name, _), low, high in zip(batch, smallest, largest, strict=True):
        if low != high:
            raise ValueError(
                f"{name} differs between ranks, and an export stores those of one: make them equal first, by a broadcast "
                "for instance"
            )


def _digest(tensor: Tensor) -> int:
    """Return a digest of the values of a tensor, or of the codes and scales of a weight."""
    parts = [tensor.detach()]
    if isinstance(tensor, QuantizedWeight):
        buffers = {name: tensor.state.buffers[name] for name in tensor.state.names_read_by_products()}
        parts = [
            buffer if buffer.dim() == 1 else unpadded(tensor, name, buffer)
            for name, buffer in buffers.items()
            if buffer is not None and not name.startswith("columnwise")
        ]
    return digest(*(part.contiguous() for part in parts))


def _on_rank_0(group: Group, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 while the others wait; its error is raised on every rank."""
    return work() if group.size == 1 else from_rank_0(group, work, EXPORTS)


def _begin(folder: Folder[Any]) -> Location:
    if folder.holds_anything():
        raise ValueError(f"{folder.path} is not empty: export into a new folder")
    partial_folder: Location = folder.begin()
    return partial_folder


def _finish(folder: Folder[Any], plan: ExportPlan, files: Mapping[str, bytes]) -> None:
    """Add the other files and commit the folder. The index, without which no reader finds the
    weights, is the last file.
    """
    check_written(folder.partial, {file.name: file.nbytes for file in plan.files})
    for name, content in {**files, INDEX: plan.index}.items():
        (folder.partial / name).write_bytes(content)
        sync(folder.partial / name)
    folder.commit()


logger = logging.getLogger(__name__)

_REMEDY = (
    "train with quantize_(..., serve='vllm'), or pass allow_unequal_scales=True for readers that keep the scales apart, as "
    "transformers does"
)


def check_shared_amaxes(
    naming: str,
    pieces: Mapping[str, Sequence[Piece]],
    formats: Mapping[str, FormatSpec],
    shared: Mapping[str, SharedAmax | None],
) -> None:
    """Raise ValueError for weights that engines fuse and that do not share their tensor amax in
    training. Called before any of them is read.
    """
    weight_of: dict[str, str] = {}
    for name, fmt in formats.items():
        if layout_of(naming, name, fmt).shares_amax:
            weight_of |= dict.fromkeys((piece.name for piece in pieces[name]), name)
    for group in groups_of(FUSED, weight_of):
        members = {weight_of[name] for name in group.names}
        if len(members) > 1 and len({shared[name] or name for name in members}) > 1:
            raise ValueError(
                f"{group} have different tensor amaxes, and an engine that fuses them takes one: {_REMEDY}"
            )


class FusedAmaxes:
    """The tensor amaxes of the weights that an export has written."""

    def __init__(self, naming: str, allow_unequal: bool) -> None:
        self._naming = naming
        self._allow_unequal = allow_unequal
        # By stored name.
        self._amaxes: dict[str, float] = {}

    def note(self, name: str, weight: QuantizedWeight, pieces: Sequence[Piece]) -> None:
        """Remember the amax of a weight that is written."""
        if self._naming != "bf16" and layout_of(self._naming, name, weight.format).shares_amax:
            assert weight.amax is not None
            self._amaxes |= dict.fromkeys((piece.name for piece in pieces), weight.amax.item())

    def check(self) -> None:
        """Raise ValueError, or one warning, for weights that engines fuse and whose scales
        differ.
        """
        unequal = []
        for group in groups_of(FUSED, self._amaxes):
            amaxes = [self._amaxes[name] for name in group.names]
            if min(amaxes) != max(amaxes):
                unequal.append((min(amaxes) / max(amaxes), group))
        if not unequal:
            return
        share, group = min(unequal, key=lambda item: item[0])
        text = (
            f"{len(unequal)} groups of weights that engines fuse have different tensor amaxes; an engine that takes one "
            f"global scale for {group} decodes some of them to {share:.2f} of their values"
        )
        if not self._allow_unequal:
            raise ValueError(f"{text}: {_REMEDY}")
        logger.warning("%s: quantize_(..., serve='vllm') gives them one", text)
