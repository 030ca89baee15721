"""Agreement: what all ranks must have alike is compared once, and what is wrong on one rank raises on every rank, never a hang."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from zerocast.group import Group

Problem = tuple[type[Exception], str]


def agree(group: Group, lines: Sequence[str], problem: Exception | None, payload: Any = None) -> list[Any]:
    """Exchange `payload` over the group, if all is well everywhere; returns the payloads by rank.

    `problem` is what this rank found wrong, `lines` describe what all ranks must have alike, one line an item. Raises the
    first rank's problem, with the rank in the message when there are several, or ValueError naming the first line that
    differs.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    kind = next((kind for kind in (TypeError, ValueError) if isinstance(problem, kind)), RuntimeError)
    found = None if problem is None else (kind, str(problem))
    replies = group.all_gather_object((found, digest, payload))
    for rank, (reported, *_) in enumerate(replies):
        if reported is not None:
            wrong, text = reported
            raise wrong(text if group.size == 1 else f"rank {rank}: {text}")
    if len({hashed for _, hashed, _ in replies}) > 1:
        _raise_difference(group.all_gather_object(list(lines)))
    return [content for *_, content in replies]


def from_rank_0(group: Group, work: Callable[[], Any]) -> Any:
    """What rank 0 gets from `work`, on every rank; what it raises is raised everywhere, as `agree` raises it."""
    result, problem = None, None
    if group.rank == 0:
        try:
            result = work()
        except Exception as error:
            problem = error
    return agree(group, [], problem, result)[0]


def _raise_difference(by_rank: list[list[str]]) -> None:
    first = by_rank[0]
    for rank, lines in enumerate(by_rank):
        if len(lines) != len(first):
            raise ValueError(f"rank 0 passes {len(first)} weights and rank {rank} {len(lines)}: all pass the same list")
        for index, (expected, found) in enumerate(zip(first, lines, strict=True)):
            if expected != found:
                raise ValueError(
                    f"weight {index} is {expected} on rank 0 and {found} on rank {rank}: all pass the same list"
                )
    raise AssertionError("digests differ and lists do not")
