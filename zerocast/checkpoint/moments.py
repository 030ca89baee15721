"""Moments of an optimizer as a checkpoint holds them: what their values may be, and whether those
of a file are so, before any of them is loaded.
"""

import math
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from zerocast.checkpoint.sources.safe_reader import SafeReader
from zerocast.distributed.group import Group

PREFIX = "optim.state."  # before the name of a parameter
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")
MOMENTS = ("exp_avg", "momentum_buffer", *SECOND_MOMENTS)


def check_values(name: str, key: str, moment: Tensor) -> None:
    """ValueError for a moment of a parameter that holds NaN, Inf, or negative squares."""
    lowest, highest = torch.stack(torch.aminmax(moment)).tolist()
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        raise ValueError(f"{key} of {name} holds NaN or Inf in the state")
    if lowest < 0 and key in SECOND_MOMENTS:
        raise ValueError(f"{key} of {name} holds {lowest} in the state, and second moments are squares")


def problems_of_values(reader: SafeReader, metadata: Metadata, known: Mapping[str, Any], group: Group) -> list[str]:
    """The problems of the moments of `known` parameters in a checkpoint, of which each rank reads
    a part.
    """
    found: list[str] = []
    try:
        for name, key, moment in _stored(reader, metadata, known, group):
            try:
                check_values(name, key, moment)
            except ValueError as error:
                found.append(str(error))
    except (EOFError, OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        # Memory that runs out says nothing of the file. Where other ranks wait to hear of an error,
        # it is told like one.
        if isinstance(error, torch.OutOfMemoryError) and group.size == 1:
            raise
        found.append(f"its moments cannot be read: {error}")
    return found


def _stored(
    reader: SafeReader, metadata: Metadata, known: Mapping[str, Any], group: Group
) -> Iterator[tuple[str, str, Tensor]]:
    """(parameter, moment, values) of this rank's part of the chunks in the files."""
    chunks = [(index.fqn.removeprefix(PREFIX).rpartition("."), place) for index, place in metadata.storage_data.items()]
    wanted = [(name, key, place) for (name, _, key), place in chunks if name in known and key in MOMENTS]
    for name, key, place in wanted[group.rank :: group.size]:
        if place.transform_descriptors:
            continue  # compressed by another program: looked at once it is loaded
        with reader.fs.create_stream(Path(reader.path, place.relative_path), "rb") as stream:
            moment = torch.load(reader._slice_file(stream, place), map_location="cpu", weights_only=True)
        if type(moment) is Tensor and moment.numel():
            yield name, key, moment
