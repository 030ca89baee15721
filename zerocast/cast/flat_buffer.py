"""Flat buffers: one tensor behind the same buffer of many weights, so that a stage sees few
storages.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zerocast.formats import layout
from zerocast.formats.layout import BUFFER_ALIGNMENT_ELEMENTS, round_up
from zerocast.weight import QuantizedWeight


def into_flat_buffer(weights: Sequence[QuantizedWeight], name: str) -> list[Tensor]:
    """Move buffer `name` of every weight that has one into one flat tensor a dtype; returns these.

    Weights whose format has the buffer but which have none yet get uninitialised storage.
    """
    wanted: dict[torch.dtype, list[tuple[QuantizedWeight, layout.Buffer]]] = {}
    for weight in weights:
        buffer = layout.buffers(weight.format, weight.shape, weight.dtype)[name]
        if buffer is not None:
            wanted.setdefault(buffer.dtype, []).append((weight, buffer))
    flats = []
    for dtype, members in wanted.items():
        sizes = [round_up(math.prod(buffer.shape), BUFFER_ALIGNMENT_ELEMENTS) for _, buffer in members]
        flat = torch.empty(sum(sizes), dtype=dtype, device=members[0][0].device)
        for (weight, buffer), part in zip(members, flat.split(sizes), strict=True):
            weight.state.move_to({name: part[: math.prod(buffer.shape)].view(buffer.shape)})
        flats.append(flat)
    return flats
