"""GradientExchange: reduced gradients go from the ranks that share them to those that own their
matrices in whole.

They are reduced while a backward pass runs, into equal shards whoever owns the parameter, so norms,
clips and whatever else is done to gradients know one layout (`bucket.Layout`). A step then brings
them together, a round after the other: in each the next matrices of every rank, as many as take
`limit` elements, or one that is larger. So a round is there beside the shard, and no second shard.

Every rank knows both layouts, and the lengths of all messages from them. Padding is not sent. One
rank sends nothing, and its matrices are read where they were reduced.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from zerocast.distributed.group import Group
from zerocast.formats.layout import Span
from zerocast.optim.bucket import Bucket, Layout, Slot


class Matrix(NamedTuple):
    """One matrix, or one of a stack: where it lies in its parameter, in elements."""

    slot: Slot
    span: Span


def owned_matrices(bucket: Bucket) -> Iterator[tuple[int, Matrix]]:
    """(rank that owns it, matrix) of all parameters of a bucket that ranks own in whole."""
    for slot in bucket.slots:
        size = math.prod(slot.shape[-2:])
        for start in range(0, slot.numel, size):
            yield slot.offset // bucket.shard_numel, Matrix(slot, Span(start, start + size))


def rounds(layout: Layout, ranks: int, limit: int) -> list[tuple[Sequence[Matrix], ...]]:
    """What each rank gets in each round, in the order of its matrices; nothing once it has all."""
    owned: list[list[Matrix]] = [[] for _ in range(ranks)]
    for bucket in layout.buckets:
        for owner, matrix in owned_matrices(bucket) if bucket.storage.whole else ():
            owned[owner].append(matrix)
    return list(zip_longest(*(_up_to(limit, matrices) for matrices in owned), fillvalue=()))


def most_sent(layout: Layout, ranks: int) -> int:
    """The elements that a rank sends to others in all rounds, of the rank that sends most."""
    whole = [bucket for bucket in layout.buckets if bucket.storage.whole]
    owners = {slot.name: slot.offset // bucket.shard_numel for bucket in whole for slot in bucket.slots}
    sent, changes = [0] * ranks, [0] * ranks  # changes from rank to rank of what whole shards add
    for bucket in layout.gradients:
        for slot in bucket.slots:
            owner = owners.get(slot.name)
            if owner is None:
                continue
            first, last = (at // bucket.shard_numel for at in (slot.offset, slot.offset + slot.numel - 1))
            for rank in {first, last}:
                sent[rank] += bucket.owned(slot, rank)[0].numel
            changes[min(first + 1, last)] += bucket.shard_numel
            changes[last] -= bucket.shard_numel
            sent[owner] -= bucket.owned(slot, owner)[0].numel
    return max(map(sum, zip(sent, accumulate(changes), strict=True)))


def _up_to(limit: int, matrices: Iterable[Matrix]) -> Iterator[list[Matrix]]:
    batch: list[Matrix] = []
    held = 0
    for matrix in matrices:
        if batch and held + matrix.span.numel > limit:
            yield batch
            batch, held = [], 0
        batch.append(matrix)
        held += matrix.span.numel
    if batch:
        yield batch


@dataclass(frozen=True)
class _Round:
    """What this rank sends, as spans of its flat shard, by receiver; the elements that arrive from
    each rank and those for each; where the parts of its matrices are in what arrives, of one rank
    in the shard itself.
    """

    sent: list[Span]
    lengths: tuple[list[int], list[int]]
    matrices: list[list[Span]]


class GradientExchange:
    """The exchange of one optimizer. `limit`: elements that a rank gets at a time, unless one
    matrix has more.
    """

    def __init__(self, layout: Layout, group: Group, limit: int) -> None:
        self._group = group
        self._places = {slot.name: (bucket, slot) for bucket in layout.gradients for slot in bucket.slots}
        self._rounds = [self._round(by_rank) for by_rank in rounds(layout, group.size, limit)]
        self._most = max((sum(round_.lengths[0]) for round_ in self._rounds), default=0)

    def deliver(self, shard: Tensor, take: Callable[[Tensor], None]) -> None:
        """Call `take` with the whole gradient of each of this rank's matrices, f32 and flat, in
        their order; `shard` is this rank's flat part of all gradients. Collective.

        A gradient is there as long as `take` runs, and what that leaves lies beside the next round.
        """
        arrived = shard if self._group.size == 1 else shard.new_empty(self._most)
        for number, round_ in enumerate(self._rounds, 1):
            if self._group.size > 1:
                self._exchange(round_, shard, arrived, f"{number} of {len(self._rounds)}")
            for spans in round_.matrices:
                take(_joined(arrived, spans))

    def _exchange(self, round_: _Round, shard: Tensor, arrived: Tensor, what: str) -> None:
        out = arrived[: sum(round_.lengths[0])]
        what = f"gradients for the owners of matrices, round {what}"
        self._group.all_to_all(out, _joined(shard, round_.sent), what=what, lengths=round_.lengths)

    def _round(self, by_rank: Sequence[Sequence[Matrix]]) -> _Round:
        me, ranks = self._group.rank, range(self._group.size)
        sent: list[Span] = []
        lengths: tuple[list[int], list[int]] = [0] * len(ranks), [0] * len(ranks)
        for receiver, matrices in enumerate(by_rank):
            for matrix in matrices:
                part = self._part(matrix, me)
                lengths[1][receiver] += part.numel
                _append(sent, part)
        mine: list[list[Span]] = [[] for _ in by_rank[me]]
        at = 0
        for sender in ranks:
            for spans, matrix in zip(mine, by_rank[me], strict=True):
                part = self._part(matrix, sender)
                lengths[0][sender] += part.numel
                _append(spans, part if len(ranks) == 1 else Span(at, at + part.numel))
                at += part.numel
        return _Round(sent, lengths, mine)

    def _part(self, matrix: Matrix, rank: int) -> Span:
        """The part of a matrix's gradient that a rank has, in that rank's flat shard."""
        bucket, slot = self._places[matrix.slot.name]
        span, start = bucket.owned(slot, rank)
        common = span.intersect(matrix.span)
        start += common.start - span.start
        return Span(start, start + common.numel)


def _append(spans: list[Span], span: Span) -> None:
    """Add a span; one that goes on where the last ends makes that longer."""
    if not span.numel:
        return
    if spans and spans[-1].stop == span.start:
        span = Span(spans.pop().start, span.stop)
    spans.append(span)


def _joined(flat: Tensor, spans: Sequence[Span]) -> Tensor:
    """These parts of a flat tensor end to end, without a copy if they are one."""
    parts = [flat[span.start : span.stop] for span in spans] or [flat[:0]]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
