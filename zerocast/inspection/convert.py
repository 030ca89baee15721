"""Convert masters to a checkpoint, or to safetensors in the naming of an inference engine.

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
from zerocast.checkpoint.manifest import Stored
from zerocast.checkpoint.sources.source import dtype_name, read_span
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats import AmaxPolicy
from zerocast.formats.layout import Span
from zerocast.inspection.contents import Contents
from zerocast.inspection.format_selection import Chosen
from zerocast.quantize import cast_whole
from zerocast.serve.export import SHARD_BYTES, write_safetensors
from zerocast.serve.weight_source import LazyTensors
from zerocast.weight import QuantizedWeight

Reading = Callable[[str], object]  # is told the name of a weight before it is read


def to_checkpoint(
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
    write(state, path, ONE_PROCESS, formats=formats, planner=_Planner(contents, dtype, reading))


def to_safetensors(
    contents: Contents,
    names: Sequence[str],
    chosen: Chosen,
    folder: Path,
    naming: str,
    nominal: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    reading: Reading = str,
) -> list[Path]:
    """Write the chosen weights cast from their masters and all others in the nominal dtype.

    Returns the paths and raises like `export_safetensors`.
    """
    return write_safetensors(tensors(contents, names, chosen, nominal, reading), folder, naming, shard_bytes)


class _Planner(DefaultSavePlanner):
    """Supplies the values of a state dictionary whose tensors have shapes but no memory."""

    def __init__(self, contents: Contents, dtype: torch.dtype, reading: Reading) -> None:
        super().__init__()
        self._contents, self._dtype, self._reading = contents, dtype, reading

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        name = index.fqn.removeprefix("model.")
        self._reading(name)
        return _master(self._contents, name).to(self._dtype)


def tensors(
    contents: Contents, names: Sequence[str], chosen: Chosen, nominal: torch.dtype, reading: Reading = str
) -> LazyTensors:
    """The chosen weights cast from their masters, and all others in the nominal dtype, each read
    when it is asked for.
    """

    def load(name: str) -> Tensor:
        reading(name)
        return _quantized(contents, name, chosen) if name in chosen.formats else _master(contents, name).to(nominal)

    shapes = {name: contents.entries[name].shape for name in names}
    return LazyTensors(shapes, {name: fmt for name, (fmt, _) in chosen.formats.items()}, load, nominal)


def _master(contents: Contents, name: str) -> Tensor:
    entry = contents.entries[name]
    return read_span(contents.source, contents.masters[name], Span(0, entry.numel)).view(entry.shape)


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
