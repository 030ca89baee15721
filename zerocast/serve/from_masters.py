"""Weights cast from stored masters, as the source of an export, and a checkpoint of the masters.

Tensors are read when they are written: one at a time for a checkpoint, those of one file for
safetensors.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from zerocast.checkpoint.checkpoint import write
from zerocast.checkpoint.manifest import Manifest, Stored
from zerocast.checkpoint.sources.source import dtype_name, read_span
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats.layout import Span
from zerocast.formats.recipe import Recipe
from zerocast.formats.shared_amax import SharedAmax
from zerocast.inspection.contents import Chosen, Contents
from zerocast.quantize import cast_together
from zerocast.serve.weight_source import LazyTensors
from zerocast.weight import QuantizedWeight

Reading = Callable[[str], object]  # is told the name of a weight before it is read


def write_checkpoint(
    contents: Contents,
    names: Sequence[str],
    chosen: Chosen,
    path: Path,
    dtype: torch.dtype = torch.float32,
    reading: Reading = str,
) -> None:
    """Write `model.<name>` in `dtype` for `zerocast.optim.load_masters`, and record the formats.

    Raises RuntimeError if the checkpoint cannot be written.
    """
    shapes = {name: contents.entries[name].shape for name in names}
    # shapes without memory
    state = {"model": {name: torch.empty((), dtype=dtype).expand(shape) for name, shape in shapes.items()}}
    formats = {name: Stored(str(fmt), dtype_name(dtype)) for name, (fmt, dtype) in chosen.formats.items()}
    write(state, path, ONE_PROCESS, Manifest(formats=formats), planner=_Planner(contents, dtype, reading))


class _Planner(DefaultSavePlanner):
    """Supplies the values of a state dictionary whose tensors have shapes but no memory."""

    def __init__(self, contents: Contents, dtype: torch.dtype, reading: Reading) -> None:
        super().__init__()
        self._contents, self._dtype, self._reading = contents, dtype, reading

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        name = index.fqn.removeprefix("model.")
        self._reading(name)
        return _master(self._contents, name).to(self._dtype)


def cast_tensors(
    contents: Contents,
    names: Sequence[str],
    chosen: Chosen,
    nominal: torch.dtype,
    reading: Reading = str,
    share_amax: str | None = None,
) -> LazyTensors:
    """The chosen weights cast from their masters, and all others in the nominal dtype, each read
    when it is asked for.

    Weights share a tensor amax as in the run that saved them, or as `share_amax` says; such a group
    is read for each of its members.
    """
    shared = _shared(contents, chosen, share_amax)

    def load(name: str) -> Tensor:
        reading(name)
        if name not in chosen.formats:
            return _master(contents, name).to(nominal)
        group = shared.get(name)
        members = [name] if group is None else list(group.names)
        masters = [_master(contents, member) for member in members]
        weights = [_empty(contents, member, chosen) for member in members]
        for weight in weights:
            weight.state.shared_amax = group
        if any(weight.scale is not None and not _has_scale(contents, name) for weight in weights):
            cast_together(weights, masters)  # finds the amax that scales the cast
        cast_together(weights, masters)
        return weights[members.index(name)]

    shapes = {name: contents.entries[name].shape for name in names}
    return LazyTensors(shapes, {name: fmt for name, (fmt, _) in chosen.formats.items()}, load, nominal)


def _shared(contents: Contents, chosen: Chosen, share_amax: str | None) -> dict[str, SharedAmax]:
    formats = {name: fmt for name, (fmt, _) in chosen.formats.items()}
    recipe = Recipe(formats, share_amax=share_amax or ())
    recorded = contents.shared_amaxes(name for name in formats if str(formats[name]) == _format_of(contents, name))
    return recipe.shared_amaxes(formats) if share_amax else recorded


def _format_of(contents: Contents, name: str) -> str | None:
    return contents.stored[name].format if name in contents.stored else None


def _master(contents: Contents, name: str) -> Tensor:
    entry = contents.entries[name]
    return read_span(contents.source, contents.masters[name], Span(0, entry.numel)).view(entry.shape)


def _has_scale(contents: Contents, name: str) -> bool:
    return name in contents.stored and contents.cast_scale(name) is not None


def _empty(contents: Contents, name: str, chosen: Chosen) -> QuantizedWeight:
    """A weight to cast, with the scale of its last cast if that was delayed and is known."""
    fmt, dtype = chosen.formats[name]
    weight = QuantizedWeight.empty(contents.entries[name].shape, fmt, dtype)
    scale = contents.cast_scale(name) if weight.scale is not None and name in contents.stored else None
    if scale is not None:
        assert weight.scale is not None
        weight.scale.copy_(scale)
    return weight
