"""Checks of the moments in a checkpoint's files, made before any of them is loaded: no moment may
have NaN or Inf, no second moment may be negative, and codes are in the range of
docs/formats/moments_8bit.md.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from zerocast.checkpoint.sources.dcp import SafeReader
from zerocast.distributed.group import Group

# The prefix of the keys of moments, before the name of the parameter.
PREFIX = "optim.state."
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale", "momentum_buffer_scale")
MOMENTS = ("exp_avg", "momentum_buffer", *SECOND_MOMENTS)


def check_values(name: str, key: str, moment: Tensor) -> None:
    """Raise ValueError if a moment of a parameter has NaN or Inf, if a second moment is negative,
    or if a code is out of range.
    """
    lowest, highest = torch.stack(torch.aminmax(moment)).tolist()
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        raise ValueError(f"{key} of {name} holds NaN or Inf in the state")
    if lowest < 0 and key in SCALES:
        raise ValueError(f"{key} of {name} holds {lowest} in the state, but scales are not negative")
    if moment.dtype is torch.int8 and lowest < -127:
        raise ValueError(f"{key} of {name} holds {lowest} in the state, but codes are from -127 to 127")
    if lowest < 0 and key in SECOND_MOMENTS:
        raise ValueError(f"{key} of {name} holds {lowest} in the state, but second moments are not negative")


def problems_of_values(reader: SafeReader, metadata: Metadata, known: Mapping[str, Any], group: Group) -> list[str]:
    """Return the problems of the moments in a checkpoint, for parameters whose names are in
    `known`. Each rank reads and checks a part of the files. A file that cannot be read raises on
    the rank that reads it only.
    """
    chunks = []
    for index, location in metadata.storage_data.items():
        name, _, key = index.fqn.removeprefix(PREFIX).rpartition(".")
        if name in known and key in (*MOMENTS, *SCALES):
            chunks.append((name, key, location))
    problems: list[str] = []
    for name, key, location in chunks[group.rank :: group.size]:
        if location.transform_descriptors:
            # Another program compressed the chunk. Its values are checked after loading.
            continue
        with reader.fs.create_stream(reader.fs.concat_path(reader.path, location.relative_path), "rb") as stream:
            moment = torch.load(reader._slice_file(stream, location), map_location="cpu", weights_only=True)
        if type(moment) is not Tensor or not moment.numel():
            continue
        try:
            check_values(name, key, moment)
        except ValueError as error:
            problems.append(str(error))
    return problems
