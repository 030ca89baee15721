"""Stack: shards of one geometry side by side, so that what is done to each of them is done to all at once.

The layers of a model repeat their shapes. Where those are sharded alike, the bytes to send lie at equal distances and so do the
scale buffers that the stages fill: one strided copy takes the scales of all of them from one to the other.
"""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from zerocast.cast.partition import MasterShard
from zerocast.formats import layout
from zerocast.fsdp2.shard_weight import ShardWeight


def by_geometry(weights: Iterable[ShardWeight]) -> list[list[ShardWeight]]:
    """The weights whose shards have the same layout, together, in the order of their first."""
    found: dict[Hashable, list[ShardWeight]] = {}
    for weight in weights:
        found.setdefault((weight.format, weight.rows, weight.columns, weight.nominal, weight.shards), []).append(weight)
    return list(found.values())


class Stack:
    """`weights` of one geometry over zero bytes `sent`, `[weights, wire.nbytes]`; `shards` is what the stages are given.

    `copies` are (target, source) pairs: the scales of the block rows that this rank owns, in the side channels and in the
    buffers that the stages fill.
    """

    def __init__(self, weights: Sequence[ShardWeight], sent: Tensor) -> None:
        first, count = weights[0], len(weights)
        self.sent = sent
        self.shards: list[MasterShard] = []
        self.copies: list[tuple[Tensor, Tensor]] = []
        scales: dict[str, Tensor] = {}
        specs = layout.buffers(first.format, (first.cast_rows, first.columns), first.nominal)
        for one in first.wire.scales:
            spec = specs[one.name]
            assert spec is not None
            scales[one.name] = torch.full((count, *spec.shape), spec.padding, dtype=spec.dtype, device=sent.device)
        for index, weight in enumerate(weights):
            self.shards.append(weight.bind(sent[index], {name: buffer[index] for name, buffer in scales.items()}))
        if first.takes_part:
            self.copies = first.outgoing_scales(sent, scales)
