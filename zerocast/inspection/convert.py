"""Convert masters to a checkpoint, or to safetensors in the naming of an inference engine.

Tensors are read when they are written: one at a time for a checkpoint, those of one file for
safetensors.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from zerocast.checkpoint.checkpoint import write
from zerocast.checkpoint.export import SHARD_BYTES, Item, write_safetensors
from zerocast.checkpoint.manifest import Stored
from zerocast.checkpoint.sources.source import dtype_name, read_span
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats import AmaxPolicy
from zerocast.formats.layout import Span
from zerocast.inspection.contents import Contents
from zerocast.inspection.format_selection import Chosen
from zerocast.quantize import cast_whole
from zerocast.weight import QuantizedWeight


def to_checkpoint(contents: Contents, names: Sequence[str], chosen: Chosen, path: Path) -> None:
    """Write `model.<name>` in FP32 for `zerocast.optim.load_masters`, and record the formats.

    Raises RuntimeError if the checkpoint cannot be written.
    """
    shapes = {name: contents.entries[name].shape for name in names}
    # shapes without memory
    state = {"model": {name: torch.empty(()).expand(shape) for name, shape in shapes.items()}}
    formats = {name: Stored(str(fmt), dtype_name(dtype)) for name, (fmt, dtype) in chosen.formats.items()}
    write(state, path, ONE_PROCESS, formats=formats, planner=_Planner(contents))


def to_safetensors(
    contents: Contents,
    names: Sequence[str],
    chosen: Chosen,
    folder: Path,
    naming: str,
    nominal: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write the chosen weights cast from their masters and all others in the nominal dtype.

    Returns the paths and raises like `export_safetensors`.
    """
    return write_safetensors(_items(contents, names, chosen, nominal), folder, naming, shard_bytes)


class _Planner(DefaultSavePlanner):
    """Supplies the values of a state dictionary whose tensors have shapes but no memory."""

    def __init__(self, contents: Contents) -> None:
        super().__init__()
        self._contents = contents

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _master(self._contents, index.fqn.removeprefix("model."))


def _items(contents: Contents, names: Sequence[str], chosen: Chosen, nominal: torch.dtype) -> Mapping[str, Item]:
    found = {}
    for name in names:
        numel = contents.entries[name].numel
        if name in chosen.formats:
            found[name] = Item(numel, chosen.formats[name][0], functools.partial(_quantized, contents, name, chosen))
        else:
            found[name] = Item(numel, None, functools.partial(_rounded, contents, name, nominal))
    return found


def _master(contents: Contents, name: str) -> Tensor:
    entry = contents.entries[name]
    return read_span(contents.source, contents.masters[name], Span(0, entry.numel)).view(entry.shape)


def _rounded(contents: Contents, name: str, nominal: torch.dtype) -> Tensor:
    return _master(contents, name).to(nominal)


def _quantized(contents: Contents, name: str, chosen: Chosen) -> QuantizedWeight:
    (fmt, dtype), master = chosen.formats[name], _master(contents, name)
    weight = QuantizedWeight.empty(master.shape, fmt, dtype)
    if fmt.amax_policy is AmaxPolicy.DELAYED:
        scale = contents.cast_scale(name) if name in contents.stored else None
        assert weight.scale is not None
        if scale is None:
            cast_whole(weight, master)  # finds the amax that scales the cast
        else:
            weight.scale.copy_(scale)
    cast_whole(weight, master)
    return weight
