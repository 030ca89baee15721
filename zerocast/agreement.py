"""Agreement: what all ranks must have alike is compared once, and what is wrong on one rank raises on every rank, never a hang."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zerocast.freshness import debugging
from zerocast.group import Group


@dataclass(frozen=True)
class Reply:
    """What one rank says: the call it makes, (kind, text) of what it found wrong, a digest of its lines, and the payload."""

    what: str
    problem: tuple[type[Exception], str] | None
    digest: str
    payload: Any


def agree(
    group: Group, lines: Sequence[str], problem: Exception | None, payload: Any = None, what: str = "agrees"
) -> list[Any]:
    """Exchange `payload` over the group, if all is well everywhere; returns the payloads by rank.

    `problem` is what this rank found wrong, `lines` describe what all ranks must have alike, one line an item, `what` is the call
    that this belongs to, as a verb. Raises RuntimeError for ranks that are in different calls, the first rank's problem, with
    the rank in the message when there are several, or ValueError naming the first line that differs.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    kind = next((kind for kind in (TypeError, ValueError) if isinstance(problem, kind)), RuntimeError)
    found = None if problem is None else (kind, str(problem))
    replies: list[Reply] = group.all_gather_object(Reply(what, found, digest, payload))
    _check_calls([reply.what if isinstance(reply, Reply) else "gathers objects" for reply in replies])
    for rank, reply in enumerate(replies):
        if reply.problem is not None:
            wrong, text = reply.problem
            raise wrong(text if group.size == 1 else f"rank {rank}: {text}")
    if len({reply.digest for reply in replies}) > 1:
        _raise_difference(group.all_gather_object(list(lines)))
    return [reply.payload for reply in replies]


def roll_call(group: Group, what: str) -> None:
    """In debug mode: RuntimeError on every rank unless all of them make this call now."""
    if debugging() and group.size > 1:
        agree(group, [], None, what=what)


def _check_calls(by_rank: list[str]) -> None:
    for rank, what in enumerate(by_rank):
        if what != by_rank[0]:
            raise RuntimeError(
                f"ranks make different calls: rank 0 {by_rank[0]}, rank {rank} {what}; every rank makes the same calls in the "
                "same order"
            )


def from_rank_0(group: Group, work: Callable[[], Any], what: str) -> Any:
    """What rank 0 gets from `work`, on every rank; what it raises is raised everywhere, as `agree` raises it with `what`."""
    result, problem = None, None
    if group.rank == 0:
        try:
            result = work()
        except Exception as error:
            problem = error
    return agree(group, [], problem, result, what)[0]


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
