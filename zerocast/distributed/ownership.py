"""Ownership: which rank owns which elements of a list of weights.

Ranks do not exchange the spans that they own, which would cost every rank the spans of all. Each
adds up, for every weight, the number of its elements and `h(stop) - h(start)`, where h is a hash of
a position, and one all-reduce sums these over the ranks. In the sum of spans that lie end to end
every position but the outer two cancels. So a weight whose sums are those of one span over all of
it is owned once, element for element. Spans themselves are exchanged where they are needed: of
weights whose sums are others, since these have a gap or an overlap, and of spans whose ends lie
inside a unit of the weight: a byte of two codes, or elements that are exchanged together.
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

HASHES = 2  # of 40 bits each, so that the sums of four million ranks fit into 64 bits


class Piece(NamedTuple):
    """Elements `[start, stop)` of a weight, which `rank` owns."""

    start: int
    stop: int
    rank: int


@dataclass(frozen=True)
class Item:
    """A weight of `numel` elements, and what it is called in errors. Ranks need to know who owns
    the parts of a `unit` of so many elements that a boundary cuts.
    """

    numel: int
    unit: int
    name: str


@dataclass(frozen=True)
class Ownership:
    """`owned[i]` elements of item i have an owner; `pieces[i]` are the spans of it that ranks
    exchanged, in order: all spans of an item with gaps, and spans that begin or end inside a unit.
    """

    items: Sequence[Item]
    owned: list[int]
    pieces: dict[int, list[Piece]]

    def covers(self, index: int) -> bool:
        """True if every element has an owner."""
        return self.owned[index] == self.items[index].numel

    def spans(self, index: int) -> list[Span]:
        """The elements that have an owner."""
        if self.covers(index):
            return [Span(0, self.owned[index])]
        return [Span(piece.start, piece.stop) for piece in self.pieces.get(index, ())]


def exchange_spans(group: Group, items: Sequence[Item], spans: Sequence[Span]) -> Ownership:
    """Find who owns what, given the span of each item that this rank owns; all ranks call it.

    At most three collectives, whose bytes grow with the items and not with the ranks, but for the
    pieces. Raises ValueError on every rank for elements that two ranks own.
    """
    if not items:
        return Ownership(items, [], {})
    sums = torch.tensor([_sums(span.start, span.stop) for span in spans], dtype=torch.int64, device=group.device)
    group.all_reduce_sum(sums, "the elements that ranks own")
    sums = sums.cpu()
    owned: list[int] = sums[:, 0].tolist()
    doubtful = _doubtful(items, sums)
    mine = [
        [index, span.start, span.stop]
        for index, (item, span) in enumerate(zip(items, spans, strict=True))
        if span.numel and (index in doubtful or span.start % item.unit or span.stop % item.unit)
    ]
    pieces = _gather_pieces(group, mine)
    for index in doubtful:
        _check_overlap(index, items[index], pieces.get(index, []))
    return Ownership(items, owned, pieces)


def whole_sums(numels: Sequence[int]) -> Tensor:
    """The sums over all ranks, i64 `[items, 1 + HASHES]`, where each element has one owner."""
    return torch.tensor([_sums(0, numel) for numel in numels], dtype=torch.int64)


@functools.lru_cache(maxsize=1 << 16)
def _sums(start: int, stop: int) -> tuple[int, ...]:
    return stop - start, *(last - first for first, last in zip(_hashes(start), _hashes(stop), strict=True))


def _hashes(position: int) -> list[int]:
    digest = hashlib.blake2b(position.to_bytes(8, "big"), digest_size=5 * HASHES).digest()
    return [int.from_bytes(digest[5 * i : 5 * i + 5], "big") for i in range(HASHES)]


def _doubtful(items: Sequence[Item], sums: Tensor) -> dict[int, None]:
    """The items with a gap or an overlap. The first one of which more elements are owned than it
    has is the last: it raises, so that a rank which passes whole weights does not send them all.
    """
    found: dict[int, None] = {}
    unlike = (sums != whole_sums([item.numel for item in items])).any(1) & (sums[:, 0] != 0)
    for index in unlike.nonzero().view(-1).tolist():
        found[index] = None
        if sums[index, 0] > items[index].numel:
            break
    return found


def _gather_pieces(group: Group, mine: list[list[int]]) -> dict[int, list[Piece]]:
    """The pieces of all ranks by item, from rows (item, start, stop) of this rank."""
    (most,) = largest_of_ranks(group, [len(mine)], "the number of spans to exchange")
    rows = torch.tensor([*mine, *[[-1, 0, 0]] * (most - len(mine))], dtype=torch.int64, device=group.device).view(-1, 3)
    by_rank = rows.new_empty(group.size, most, 3)
    if most:
        group.all_gather_into(by_rank.view(-1), rows.view(-1), what="spans")
    ranks = torch.arange(group.size).repeat_interleave(most)
    found = torch.cat((by_rank.cpu().view(-1, 3), ranks.view(-1, 1)), 1)
    pieces: dict[int, list[Piece]] = {}
    for index, start, stop, rank in sorted(found[found[:, 0] >= 0].tolist()):
        pieces.setdefault(index, []).append(Piece(start, stop, rank))
    return pieces


def _check_overlap(index: int, item: Item, pieces: Sequence[Piece]) -> None:
    for first, second in itertools.pairwise(pieces):
        if second.start < first.stop:
            raise ValueError(
                f"ranks {first.rank} and {second.rank} both own elements of weight {index} ({item.name}) from "
                f"{second.start} on; masters may not overlap"
            )
