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
    """Move the buffer `name` of all weights into flat tensors, and return one for each dtype.

    Weights whose format has no such buffer are left out. Storage of a buffer that does not exist
    yet is uninitialised.
    """
    by_dtype: dict[torch.dtype, list[tuple[QuantizedWeight, layout.Buffer]]] = {}
    for weight in weights:
        buffer = layout.buffers(weight.format, weight.shape, weight.dtype)[name]
        if buffer is not None:
            by_dtype.setdefault(buffer.dtype, []).append((weight, buffer))
    flats = []
    for dtype, members in by_dtype.items():
        sizes = [round_up(math.prod(buffer.shape), BUFFER_ALIGNMENT_ELEMENTS) for _, buffer in members]
        flat = torch.empty(sum(sizes), dtype=dtype, device=members[0][0].device)
        for (weight, buffer), part in zip(members, flat.split(sizes), strict=True):
            weight.state.move_to({name: part[: math.prod(buffer.shape)].view(buffer.shape)})
        flats.append(flat)
    return flats
