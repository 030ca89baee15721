"""GradientExchange: sends the parts of reduced gradients to the ranks that own whole matrices.

During a backward pass all gradients are reduced into equal shards, so that norms, clips and other
operations on gradients work with a single layout (`bucket.Layout`). A step then collects the
gradients of matrices at their owners, in several rounds. A round has the next matrices of every
rank, up to `limit` elements, or one matrix that is larger. So a rank needs memory for its shard and
for one round, and not for a second shard.

Every rank knows both layouts, and from them the lengths of all messages. Padding is not sent. With
one rank nothing is sent, and gradients are read from the shard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.distributed.bucket import Layout
from zerocast.distributed.group import Group
from zerocast.distributed.owned_matrices import Matrix, rounds
from zerocast.formats.layout import Span


@dataclass(frozen=True)
class _Round:
    """The messages of this rank in one round.

    Attributes:
        sent: the elements of its flat shard that it sends, in the order of the receivers.
        received_lengths: the number of elements that arrive from each rank.
        sent_lengths: the number of elements for each rank.
        matrices: for each of its matrices, the parts of the gradient in the received elements. With
            one rank, which receives nothing, they are parts of the shard.
    """

    sent: list[Span]
    received_lengths: list[int]
    sent_lengths: list[int]
    matrices: list[list[Span]]


class GradientExchange:
    """The exchange of one optimizer.

    Args:
        limit: the number of elements that a rank receives in a round, unless a single matrix has
            more.
    """

    def __init__(self, layout: Layout, group: Group, limit: int) -> None:
        self._group = group
        self._slots = {slot.name: (bucket, slot) for bucket in layout.gradients for slot in bucket.slots}
        self._rounds = [self._round(by_rank) for by_rank in rounds(layout, group.size, limit)]
        self._most_received = max((sum(round_.received_lengths) for round_ in self._rounds), default=0)

    def deliver(self, shard: Tensor, take: Callable[[Tensor], None]) -> None:
        """Call `take` with the full gradient of each of this rank's matrices, f32 and
        one-dimensional, in their order. `shard` is this rank's flat part of all gradients.
        Collective.

        A gradient is only valid until `take` returns.
        """
        received = shard if self._group.size == 1 else shard.new_empty(self._most_received)
        for number, round_ in enumerate(self._rounds, 1):
            if self._group.size > 1:
                self._exchange(number, round_, shard, received)
            for spans in round_.matrices:
                take(_joined(received, spans))

    def _exchange(self, number: int, round_: _Round, shard: Tensor, received: Tensor) -> None:
        """Send each owner its parts of this round, and receive the parts of this rank's
        matrices.
        """
        what = f"gradients for the owners of matrices, round {number} of {len(self._rounds)}"
        out = received[: sum(round_.received_lengths)]
        lengths = (round_.received_lengths, round_.sent_lengths)
        self._group.all_to_all(out, _joined(shard, round_.sent), what=what, lengths=lengths)

    def _round(self, by_rank: Sequence[Sequence[Matrix]]) -> _Round:
        own_rank = self._group.rank
        ranks = self._group.size
        sent: list[Span] = []
        sent_lengths = [0] * ranks
        for receiver, matrices in enumerate(by_rank):
            for matrix in matrices:
                part = self._part(matrix, own_rank)
                sent_lengths[receiver] += part.numel
                _append(sent, part)
        own_matrices: list[list[Span]] = [[] for _ in by_rank[own_rank]]
        received_lengths = [0] * ranks
        start = 0
        for sender in range(ranks):
            for spans, matrix in zip(own_matrices, by_rank[own_rank], strict=True):
                part = self._part(matrix, sender)
                received_lengths[sender] += part.numel
                _append(spans, part if ranks == 1 else Span(start, start + part.numel))
                start += part.numel
        return _Round(sent, received_lengths, sent_lengths, own_matrices)

    def _part(self, matrix: Matrix, rank: int) -> Span:
        """Return the part of a matrix's gradient that a rank has, in that rank's flat shard."""
        bucket, slot = self._slots[matrix.slot.name]
        span, start = bucket.owned(slot, rank)
        common = span.intersect(matrix.span)
        start += common.start - span.start
        return Span(start, start + common.numel)


def _append(spans: list[Span], span: Span) -> None:
    """Append a span. If it begins where the last one ends, extend that one."""
    if not span.numel:
        return
    if spans and spans[-1].stop == span.start:
        span = Span(spans.pop().start, span.stop)
    spans.append(span)


def _joined(flat: Tensor, spans: Sequence[Span]) -> Tensor:
    """Concatenate parts of a flat tensor; a single part is not copied."""
    parts = [flat[span.start : span.stop] for span in spans] or [flat[:0]]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
