"""Which rank owns which parameter, where each is owned in whole: bytes and work spread over ranks.

A bucket is cut into equal shards, since that is what collectives take, so the ranks' parts of it
are to be alike: each is dealt by size, the largest parameters first, to the part that holds least
(LPT, Graham 1969: the largest part is at most 4/3 of the smallest that there can be). A bucket is
filled until its padding is small. Which rank gets which part is free then, and follows the work:
the part that costs most goes to the rank that has least to do so far. So two ranks never differ by
more work than the parts of one bucket do.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
PADDING = 1 / 8  # of a bucket; one with more waits for further parameters


@dataclass(frozen=True)
class Whole(Generic[T]):
    """A parameter: `order`, when a backward pass completes it; `size`, its elements with padding;
    `cost`, what its update takes, in any unit.
    """

    order: int
    item: T
    size: int
    cost: int


def batches(members: Sequence[Whole[T]], bucket_size: int, ranks: int) -> list[list[Whole[T]]]:
    """The parameters of each bucket, in order, of at least `bucket_size` elements and with little
    padding; what is left over at the end goes with the bucket before it.
    """
    done: list[list[Whole[T]]] = []
    batch: list[Whole[T]] = []
    size = largest = 0
    for member in members:
        batch.append(member)
        size, largest = size + member.size, max(largest, member.size)
        most = (1 + PADDING) * size / ranks  # that a part may hold
        if size >= bucket_size and largest <= most and max(map(_size, _parts(batch, ranks))) <= most:
            done.append(batch)
            batch, size, largest = [], 0, 0
    if batch and done:
        done[-1] += batch
    elif batch:
        done.append(batch)
    return done


def deal(batch: Sequence[Whole[T]], loads: list[int]) -> tuple[list[tuple[int, Whole[T]]], int]:
    """((offset, parameter) in order of offsets, elements of a shard) of one bucket; `loads`, the
    work of each rank so far, is brought up to date.
    """
    parts = _parts(batch, len(loads))
    shard = max(map(_size, parts))
    parts.sort(key=lambda part: -sum(member.cost for member in part))
    placed = []
    idlest = sorted(range(len(loads)), key=lambda rank: loads[rank])
    for rank, part in zip(idlest, parts, strict=True):
        offset = rank * shard
        for member in sorted(part, key=lambda member: member.order):
            placed.append((offset, member))
            offset += member.size
            loads[rank] += member.cost
    return sorted(placed, key=lambda place: place[0]), shard


def _parts(batch: Sequence[Whole[T]], ranks: int) -> list[list[Whole[T]]]:
    """The parameters in so many parts of about one size."""
    parts: list[list[Whole[T]]] = [[] for _ in range(ranks)]
    held = [(0, part) for part in range(ranks)]
    for member in sorted(batch, key=lambda member: -member.size):
        size, part = held[0]
        parts[part].append(member)
        heapq.heapreplace(held, (size + member.size, part))
    return parts


def _size(part: Sequence[Whole[T]]) -> int:
    return sum(member.size for member in part)
