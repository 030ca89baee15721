"""The matrices of parameters that are each owned by one rank, and the parts that ranks send of
their gradients.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, zip_longest
from typing import NamedTuple

from zerocast.distributed.bucket import Bucket, Layout, Slot
from zerocast.formats.layout import Span


class Matrix(NamedTuple):
    """One matrix, or one of a stack.

    Attributes:
        slot: its parameter.
        span: its elements in the parameter.
    """

    slot: Slot
    span: Span


def owned_matrices(bucket: Bucket) -> Iterator[tuple[int, Matrix]]:
    """Yield (owner, matrix) for all matrices of a bucket whose parameters are each owned by one
    rank.
    """
    for slot in bucket.slots:
        size = math.prod(slot.shape[-2:])
        for start in range(0, slot.numel, size):
            yield slot.offset // bucket.shard_numel, Matrix(slot, Span(start, start + size))


def rounds(layout: Layout, ranks: int, limit: int) -> list[tuple[Sequence[Matrix], ...]]:
    """Return for each round, the matrices whose gradients each rank gets, in the order of its
    matrices.
    """
    owned: list[list[Matrix]] = [[] for _ in range(ranks)]
    for bucket in layout.buckets:
        for owner, matrix in owned_matrices(bucket) if bucket.storage.single_owner else ():
            owned[owner].append(matrix)
    return list(zip_longest(*(_up_to(limit, matrices) for matrices in owned), fillvalue=()))


def most_sent(layout: Layout, ranks: int) -> int:
    """Return the number of elements that a rank sends to others in all rounds, for the rank that
    sends the most.
    """
    owners: dict[str, int] = {}
    for bucket in layout.buckets:
        if bucket.storage.single_owner:
            owners |= {slot.name: slot.offset // bucket.shard_numel for slot in bucket.slots}
    sent = [0] * ranks
    # Ranks between the first and the last rank of a parameter send their full shards. To avoid a
    # loop over them, note where their number begins and ends, and accumulate at the end.
    whole_shards = [0] * ranks
    for bucket in layout.gradients:
        for slot in bucket.slots:
            owner = owners.get(slot.name)
            if owner is None:
                continue
            first = slot.offset // bucket.shard_numel
            last = (slot.offset + slot.numel - 1) // bucket.shard_numel
            for rank in {first, last}:
                sent[rank] += bucket.owned(slot, rank)[0].numel
            whole_shards[min(first + 1, last)] += bucket.shard_numel
            whole_shards[last] -= bucket.shard_numel
            sent[owner] -= bucket.owned(slot, owner)[0].numel
    return max(map(sum, zip(sent, accumulate(whole_shards), strict=True)))


def _up_to(limit: int, matrices: Iterable[Matrix]) -> Iterator[list[Matrix]]:
    """Yield batches of matrices with at most `limit` elements, or one matrix that is larger."""
    batch: list[Matrix] = []
    numel = 0
    for matrix in matrices:
        if batch and numel + matrix.span.numel > limit:
            yield batch
            batch = []
            numel = 0
        batch.append(matrix)
        numel += matrix.span.numel
    if batch:
        yield batch
