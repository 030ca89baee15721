"""Sources of masters: safetensors, plain state dicts and torch.distributed.checkpoint folders."""

import os
from collections.abc import Mapping
from typing import Any

from zerocast.checkpoint.sources.dcp import DcpSource
from zerocast.checkpoint.sources.safetensors_files import SafetensorsSource, is_safetensors
from zerocast.checkpoint.sources.source import HIGH_PRECISION, Entry, StateDictSource, TensorSource
from zerocast.checkpoint.store import AnyPath, StorePath, as_location

__all__ = ["HIGH_PRECISION", "AnySource", "Entry", "TensorSource", "open_source"]

AnySource = AnyPath | Mapping[str, Any] | TensorSource


def open_source(source: AnySource) -> TensorSource:
    """Open the tensors at a path, or of a mapping from names to tensors. A source that is open
    already is returned.

    A path is a safetensors file, an index or a folder of them; a folder of
    torch.distributed.checkpoint; or a file of torch.save. A URL must be a checkpoint. Raises
    FileNotFoundError if the path does not exist, ValueError for a damaged file,
    pickle.UnpicklingError for metadata that would run code.
    """
    if isinstance(source, Mapping):
        return StateDictSource(source)
    if not isinstance(source, (str, os.PathLike, StorePath)):
        return source
    path = as_location(source)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if isinstance(path, StorePath) or (path / ".metadata").is_file():
        return DcpSource(path)
    if is_safetensors(path):
        return SafetensorsSource(path)
    if path.is_dir():
        # The path may be the folder of a run, with checkpoints one or two levels below.
        metadata_files = [*path.glob("*/.metadata"), *path.glob("*/*/.metadata")]
        inside = sorted(str(file.parent.relative_to(path)) for file in metadata_files)
        offer = f"; it holds checkpoints, of which {inside[-1]} is the last: {', '.join(inside[-8:])}" if inside else ""
        raise ValueError(
            f"{path} holds neither safetensors files nor a checkpoint of torch.distributed.checkpoint{offer}"
        )
    return StateDictSource.of_file(path)
