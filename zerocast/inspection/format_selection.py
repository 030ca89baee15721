"""Choose the format of each weight of a checkpoint: the recorded one, or the caller's."""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from zerocast.checkpoint.manifest import Stored
from zerocast.checkpoint.sources import Entry
from zerocast.formats import FormatSpec, get_format
from zerocast.formats.layout import fits

Dtype = Literal["bfloat16", "float16", "float32"]
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}


@dataclass(frozen=True)
class Chosen:
    """The format and the nominal dtype of weights.

    Attributes:
        formats: (format, nominal dtype) by weight name.
        kept: selected weights that the format cannot take because of their shape.
    """

    formats: Mapping[str, tuple[FormatSpec, torch.dtype]]
    kept: tuple[str, ...] = ()


def choose(
    masters: Mapping[str, Entry],
    stored: Mapping[str, Stored],
    fmt: str | None,
    weights: Sequence[str],
    nominal: torch.dtype,
) -> Chosen:
    """Select `fmt` for the matrices that match a glob of `weights`, or else the stored formats.

    Raises ValueError for an unknown format and for a glob that matches no weight.
    """
    if fmt is None:
        known = {name: record for name, record in stored.items() if name in masters}
        return Chosen(
            {name: (get_format(record.format), getattr(torch, record.dtype)) for name, record in known.items()}
        )
    spec = get_format(fmt)
    matrices = {name: entry for name, entry in masters.items() if len(entry.shape) >= 2}
    for glob in weights:
        if not fnmatch.filter(matrices, glob):
            raise ValueError(f"{glob!r} matches no weight; there are: {', '.join(list(matrices)[:8])} ...")
    selected = {name: entry for name, entry in matrices.items() if any(fnmatch.fnmatchcase(name, g) for g in weights)}
    kept = tuple(name for name, entry in selected.items() if not fits(spec, entry.shape))
    return Chosen({name: (spec, nominal) for name in selected if name not in kept}, kept)
