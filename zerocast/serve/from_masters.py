"""Weights cast from stored masters, as the source of an export, and a checkpoint of the masters.

Each tensor is read just before it is written. A checkpoint holds one tensor in memory at a time,
safetensors hold those of one file.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from zerocast.checkpoint.checkpoint import write
from zerocast.checkpoint.manifest import Manifest, Stored
from zerocast.checkpoint.sources.source import read_span
from zerocast.checkpoint.store import Location
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats.element import dtype_name
from zerocast.formats.layout import Span
from zerocast.formats.recipe import Recipe
from zerocast.formats.shared_amax import SharedAmax
from zerocast.inspection import Chosen, Contents
from zerocast.quantize import cast_together
from zerocast.serve.weight_source import LazyTensors
from zerocast.weight import QuantizedWeight

# Called with the name of each weight before it is read.
Reading = Callable[[str], object]


def write_checkpoint(
    contents: Contents,
    names: Sequence[str],
    chosen: Chosen,
    path: Location,
    dtype: torch.dtype = torch.float32,
    reading: Reading = str,
) -> None:
    """Write `model.<name>` in `dtype` for `zerocast.optim.load_masters`, and record the formats.

    Raises RuntimeError if the checkpoint cannot be written.
    """
    shapes = {name: contents.entries[name].shape for name in names}
    # The tensors have shapes but no memory. The planner supplies their values one at a time.
    state = {"model": {name: torch.empty((), dtype=dtype).expand(shape) for name, shape in shapes.items()}}
    formats = {name: Stored(str(fmt), dtype_name(dtype)) for name, (fmt, dtype) in chosen.formats.items()}
    write(state, path, ONE_PROCESS, Manifest(formats=formats), planner=_Planner(contents, dtype, reading))


class _Planner(DefaultSavePlanner):
    """Supplies the values of a state dictionary whose tensors have shapes but no memory."""

    def __init__(self, contents: Contents, dtype: torch.dtype, reading: Reading) -> None:
        super().__init__()
        self._contents = contents
        self._dtype = dtype
        self._reading = reading

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
    """Return the chosen weights cast from their masters, and all others in the nominal dtype. Each
    is read when it is asked for.

    Weights share a tensor amax as in the run that saved them, or according to `share_amax`. A group
    that shares one is read again for each of its members.
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
        if any(weight.scale is not None for weight in weights) and _stored_scale(contents, name) is None:
            # A first cast with delayed scaling computes the scale for the second one.
            cast_together(weights, masters)
        cast_together(weights, masters)
        return weights[members.index(name)]

    shapes = {name: contents.entries[name].shape for name in names}
    return LazyTensors(shapes, {name: fmt for name, (fmt, _) in chosen.formats.items()}, load, nominal)


def _shared(contents: Contents, chosen: Chosen, share_amax: str | None) -> dict[str, SharedAmax]:
    formats = {name: fmt for name, (fmt, _) in chosen.formats.items()}
    if share_amax:
        return Recipe(formats, share_amax=share_amax).shared_amaxes(formats)
    stored = contents.stored
    unchanged = [name for name, fmt in formats.items() if name in stored and stored[name].format == str(fmt)]
    return contents.shared_amaxes(unchanged)


def _master(contents: Contents, name: str) -> Tensor:
    entry = contents.entries[name]
    return read_span(contents.source, contents.masters[name], Span(0, entry.numel)).view(entry.shape)


def _stored_scale(contents: Contents, name: str) -> Tensor | None:
    """Return the scale of a weight's last cast in the run that saved it, if any."""
    return contents.cast_scale(name) if name in contents.stored else None


def _empty(contents: Contents, name: str, chosen: Chosen) -> QuantizedWeight:
    """Return a weight to cast. With delayed scaling it has the stored scale of its last cast, if
    any.
    """
    fmt, dtype = chosen.formats[name]
    weight = QuantizedWeight.empty(contents.entries[name].shape, fmt, dtype)
    scale = _stored_scale(contents, name)
    if weight.scale is not None and scale is not None:
        weight.scale.copy_(scale)
    return weight
