"""Ownership: which rank owns which elements of a list of weights, found without an exchange of all
spans.

Every rank computes two kinds of numbers per weight from the span that it owns: the number of
elements, and `h(stop) - h(start)`, where h is a hash of a position. One all-reduce sums them over
the ranks. If spans follow each other without a gap, the hashes of all positions but the first and
the last cancel. So a weight whose sums equal the sums of a single span over the full weight has
exactly one owner per element.

Two kinds of spans are exchanged nevertheless: those of weights whose sums differ, since these have
a gap or an overlap, and those that begin or end inside a unit of the weight. A unit is a byte of
two codes, or a group of elements that are exchanged together.
"""

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zerocast.distributed.agreement import largest_of_ranks
from zerocast.distributed.group import Group
from zerocast.formats.layout import Span

# Hashes per position, of 40 bits each, so that the sums of four million ranks fit into 64 bits.
HASHES = 2


class Piece(NamedTuple):
    """Elements `[start, stop)` of a weight, which `rank` owns."""

    start: int
    stop: int
    rank: int


@dataclass(frozen=True)
class Item:
    """A weight whose elements are owned.

    Attributes:
        numel: the number of elements.
        unit: elements that belong together. If a boundary between ranks splits a unit, all ranks
            must know the owners of its parts.
        name: the name in errors.
    """

    numel: int
    unit: int
    name: str


@dataclass(frozen=True)
class Ownership:
    """The owners of the elements of some items.

    Attributes:
        items: the weights.
        owned: by item, the number of its elements that have an owner.
        pieces: a dict from the index of an item to the spans that ranks exchanged, in order. These
            are all spans of an item with gaps, and spans that begin or end inside a unit.
    """

    items: Sequence[Item]
    owned: list[int]
    pieces: dict[int, list[Piece]]

    def covers(self, index: int) -> bool:
        """Return True if every element has an owner."""
        return self.owned[index] == self.items[index].numel

    def spans(self, index: int) -> list[Span]:
        """Return the elements that have an owner."""
        if self.covers(index):
            return [Span(0, self.owned[index])]
        return [Span(piece.start, piece.stop) for piece in self.pieces.get(index, ())]


def exchange_spans(group: Group, items: Sequence[Item], spans: Sequence[Span]) -> Ownership:
    """Find the owners of all items, given the span of each item that this rank owns. Collective.

    It takes at most three collectives. Their bytes grow with the number of items; only the bytes of
    the pieces grow with the number of ranks. Raises ValueError on every rank for elements that two
    ranks own.
    """
    if not items:
        return Ownership(items, [], {})
    sums = torch.tensor([_sums(span.start, span.stop) for span in spans], dtype=torch.int64, device=group.device)
    group.all_reduce_sum(sums, "the elements that ranks own")
    sums = sums.cpu()
    owned: list[int] = sums[:, 0].tolist()
    doubtful = _doubtful(items, sums)
    # All ranks have the same sums, so they agree on `doubtful` without another exchange.
    own_rows = [
        [index, span.start, span.stop]
        for index, (item, span) in enumerate(zip(items, spans, strict=True))
        if span.numel and (index in doubtful or span.start % item.unit or span.stop % item.unit)
    ]
    pieces = _gather_pieces(group, own_rows)
    for index in doubtful:
        _check_overlap(index, items[index], pieces.get(index, []))
    return Ownership(items, owned, pieces)


def whole_sums(numels: Sequence[int]) -> Tensor:
    """Return the sums over all ranks, i64 `[items, 1 + HASHES]`, if each element has exactly one
    owner.
    """
    return torch.tensor([_sums(0, numel) for numel in numels], dtype=torch.int64)


@functools.lru_cache(maxsize=1 << 16)
def _sums(start: int, stop: int) -> tuple[int, ...]:
    """Return (number of elements, differences of the hashes) of a span."""
    return stop - start, *(last - first for first, last in zip(_hashes(start), _hashes(stop), strict=True))


def _hashes(position: int) -> list[int]:
    digest = hashlib.blake2b(position.to_bytes(8, "big"), digest_size=5 * HASHES).digest()
    return [int.from_bytes(digest[5 * i : 5 * i + 5], "big") for i in range(HASHES)]


def _doubtful(items: Sequence[Item], sums: Tensor) -> dict[int, None]:
    """Return the indices of items with a gap or an overlap, in order, as the keys of a dict.

    The list ends with the first item of which more elements are owned than it has. That item will
    raise anyway, and a rank that passes full weights by mistake need not send the spans of all.
    """
    doubtful: dict[int, None] = {}
    # An item of which no rank owns an element has no spans to exchange.
    differs = (sums != whole_sums([item.numel for item in items])).any(1) & (sums[:, 0] != 0)
    for index in differs.nonzero().view(-1).tolist():
        doubtful[index] = None
        if sums[index, 0] > items[index].numel:
            break
    return doubtful


def _gather_pieces(group: Group, own_rows: list[list[int]]) -> dict[int, list[Piece]]:
    """Return the pieces of all ranks by item, from rows (item, start, stop) of this rank."""
    # An all-gather needs the same number of rows from every rank. The rows that fill up the shorter
    # lists have item -1.
    (most_rows,) = largest_of_ranks(group, [len(own_rows)], "the number of spans to exchange")
    padding = [[-1, 0, 0]] * (most_rows - len(own_rows))
    rows = torch.tensor([*own_rows, *padding], dtype=torch.int64, device=group.device).view(-1, 3)
    by_rank = rows.new_empty(group.size, most_rows, 3)
    if most_rows:
        group.all_gather_into(by_rank.view(-1), rows.view(-1), what="spans")
    ranks = torch.arange(group.size).repeat_interleave(most_rows)
    table = torch.cat((by_rank.cpu().view(-1, 3), ranks.view(-1, 1)), 1)
    pieces: dict[int, list[Piece]] = {}
    for index, start, stop, rank in sorted(table[table[:, 0] >= 0].tolist()):
        pieces.setdefault(index, []).append(Piece(start, stop, rank))
    return pieces


def _check_overlap(index: int, item: Item, pieces: Sequence[Piece]) -> None:
    for first, second in itertools.pairwise(pieces):
        if second.start < first.stop:
            raise ValueError(
                f"ranks {first.rank} and {second.rank} both own elements of weight {index} ({item.name}) from "
                f"{second.start} on; masters may not overlap"
            )
