"""ChangeNotes: which bytes of its weights a plan's casts have made others, since they were last
forgotten.

A cast reads the old codes as it writes the new ones and sets a bit for each byte that becomes
another one (`../backends/README.md`). Bits stay until they are forgotten, so that many casts may
lie between two looks; a byte that became what it was before keeps its bit. No codes are kept. Bits
are those of the rowwise bytes that this rank casts: 1/8 of them.

What writes codes beside a cast is not noted. A weight whose bytes lie elsewhere than before, or
that another plan has cast in between, counts as changed in whole; one that another plan has taken
over has no notes.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from zerocast.cast.partition import MasterShard, Partition
from zerocast.formats.layout import Span, byte_range, round_up
from zerocast.weight.freshness import Freshness

WORD = 32  # bits; those of a weight begin at a word
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


class ChangeNotes:
    """The notes of one plan, whose casts `freshness` counts. `bitmap` is u8, bit i % 8 of byte
    i // 8; once `ended`, casts set no bits of it any more.
    """

    def __init__(self, freshness: Freshness) -> None:
        self.ended = False
        self._freshness = freshness
        self.bitmap = torch.empty(0, dtype=torch.uint8)
        self._partition: Partition | None = None
        self._origins: dict[int, int] = {}
        self._places: dict[int, int] = {}

    def lay_out(self, partition: Partition, cast: Collection[int]) -> None:
        """Notes for the weights `cast` of a partition, all of whose bytes count as changed."""
        self._partition, self._origins, end = partition, {}, 0
        for index in cast:
            first, last = _owned_bytes(partition.shards[index])
            self._origins[index] = end - first // WORD * WORD
            end += round_up(last, WORD) - first // WORD * WORD
        self.bitmap = torch.full((end // 8,), 255, dtype=torch.uint8, device=partition.device)
        self._places = {}

    def origin(self, index: int) -> int:
        """The bit of byte 0 of a weight, which has bits from its first owned byte on."""
        return self._origins[index]

    def follow(self, joined: Collection[int]) -> None:
        """Look where weights lie now: what lies elsewhere counts as changed, and so do those that
        have `joined` the plan again.
        """
        places = {index: self._shard(index).weight.state.rowwise_data.data_ptr() for index in self._origins}
        moved = {index for index, place in self._places.items() if places[index] != place} | {*joined}
        for index in moved & self._origins.keys():
            first, last = _owned_bytes(self._shard(index))
            origin = self._origins[index]
            self.bitmap[(origin + first // WORD * WORD) // 8 : (origin + round_up(last, WORD)) // 8] = 255
        self._places = places

    def noted(self) -> dict[int, tuple[Tensor, Span]]:
        """By index the rowwise data of each weight whose every byte a cast of this plan on some
        rank writes there, u8, and the bytes that this rank reports: a byte of two ranks, the first.
        """
        assert self._partition
        found = {}
        for index in self._origins:
            shard = self._shard(index)
            is_ours = shard.weight.state.freshness is self._freshness
            if not is_ours or shard.shard_data is not None or not self._partition.ownership.covers(index):
                continue
            first, last = _owned_bytes(shard)
            if shard.weight.format.elements_per_byte == 2:
                first += shard.span.start % 2 if shard.span.numel else 0
            found[index] = shard.weight.state.rowwise_data.view(-1).view(torch.uint8), Span(first, max(first, last))
        return found

    def changed(self, index: int, span: Span) -> Tensor:
        """Which of some bytes that this rank casts have changed, bool `[span.numel]`."""
        first, last = self._origins[index] + span.start, self._origins[index] + span.stop
        held = self.bitmap[first // 8 : -(-last // 8)]
        bits = held[:, None] & torch.tensor(_BITS, dtype=torch.uint8, device=held.device)
        return bits.view(-1)[first % 8 :][: span.numel] != 0

    def forget(self) -> None:
        """From now on note what changes after this."""
        self.bitmap.zero_()

    def _shard(self, index: int) -> MasterShard:
        assert self._partition
        return self._partition.shards[index]


def _owned_bytes(shard: MasterShard) -> tuple[int, int]:
    weight = shard.weight
    return byte_range(weight.format.halves[0], weight.matrix_shape, shard.span, weight.dtype)
