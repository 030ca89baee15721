"""The assignment of parameters to ranks, if each parameter is owned by one rank.

Bytes and work are spread over ranks. Collectives need equal shards, so the parts of a bucket should
have about the same size. Parameters go to parts by size: the largest first, each to the smallest
part so far (LPT, Graham 1969: the largest part is at most 4/3 of the optimum). A bucket is filled
until its padding is small. Parts then go to ranks by work: the most expensive part to the rank with
the least work so far. So the work of two ranks never differs by more than the work of the parts of
one bucket.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
# The most padding of a bucket, as a share of it. A bucket with more waits for further parameters.
PADDING = 1 / 8
# The dimensions of a parameter that Muon updates: a matrix, or a stack of them.
MUON_DIMS = (2, 3)


@dataclass(frozen=True)
class AssignedParameter(Generic[T]):
    """A parameter that is owned by one rank.

    Attributes:
        order: its position in the order in which a backward pass completes parameters.
        item: the parameter, which is not looked at here.
        size: its elements with padding.
        cost: the work of its update, in any unit.
    """

    order: int
    item: T
    size: int
    cost: int


def newton_schulz_flops(shape: Sequence[int], steps: int) -> int:
    """Return the operations of Newton-Schulz for a matrix, or for a stack of them. Each step has
    products of m x n with n x m, m x m with m x m, and m x m with m x n, where m is the smaller
    side.
    """
    *stack, rows, columns = shape
    m, n = sorted((rows, columns))
    flops = steps * (4 * m * m * n + 2 * m**3)
    for count in stack:
        flops *= count
    return flops


def batches(members: Sequence[AssignedParameter[T]], bucket_size: int, ranks: int) -> list[list[AssignedParameter[T]]]:
    """Return the parameters of each bucket, in order. A bucket has at least `bucket_size` elements
    and little padding. Parameters that do not fill a further bucket go into the last one.
    """
    buckets: list[list[AssignedParameter[T]]] = []
    batch: list[AssignedParameter[T]] = []
    size = largest = 0
    for member in members:
        batch.append(member)
        size += member.size
        largest = max(largest, member.size)
        part_limit = (1 + PADDING) * size / ranks
        # The first two conditions are cheap, and save most calls of `_parts`.
        if size >= bucket_size and largest <= part_limit and max(map(_size, _parts(batch, ranks))) <= part_limit:
            buckets.append(batch)
            batch = []
            size = largest = 0
    if batch and buckets:
        buckets[-1] += batch
    elif batch:
        buckets.append(batch)
    return buckets


def assign_to_ranks(
    batch: Sequence[AssignedParameter[T]], loads: list[int]
) -> tuple[list[tuple[int, AssignedParameter[T]]], int]:
    """Place the parameters of one bucket. Returns ((offset, parameter) in order of offsets,
    elements of a shard), and adds the work of the parameters to `loads`, the work of each rank.
    """
    parts = _parts(batch, len(loads))
    shard_numel = max(map(_size, parts))
    parts.sort(key=lambda part: -sum(member.cost for member in part))
    ranks_by_load = sorted(range(len(loads)), key=lambda rank: loads[rank])
    placed = []
    for rank, part in zip(ranks_by_load, parts, strict=True):
        offset = rank * shard_numel
        for member in sorted(part, key=lambda member: member.order):
            placed.append((offset, member))
            offset += member.size
            loads[rank] += member.cost
    return sorted(placed, key=lambda item: item[0]), shard_numel


def _parts(batch: Sequence[AssignedParameter[T]], ranks: int) -> list[list[AssignedParameter[T]]]:
    """Divide the parameters into `ranks` parts of about the same size."""
    parts: list[list[AssignedParameter[T]]] = [[] for _ in range(ranks)]
    # A heap of (size, index of the part).
    sizes = [(0, index) for index in range(ranks)]
    for member in sorted(batch, key=lambda member: -member.size):
        size, index = sizes[0]
        parts[index].append(member)
        heapq.heapreplace(sizes, (size + member.size, index))
    return parts


def _size(part: Sequence[AssignedParameter[T]]) -> int:
    return sum(member.size for member in part)
