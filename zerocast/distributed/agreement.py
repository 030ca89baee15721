"""Agreement between ranks: compare what all ranks must share, and raise a problem of one rank on
every rank.

A rank that raised alone would leave the others waiting in their next collective.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from zerocast.distributed.group import Group
from zerocast.weight.validity import debugging

# The digest of a text is this many integers of 62 bits.
WORDS = 4


@dataclass(frozen=True)
class Reply:
    """One rank's message to the others once they know that something is wrong or differs.

    Attributes:
        what: the call in progress, as a verb.
        problem: (class, text) of the error on this rank, or None.
        digest: a digest of its lines.
        settings: its settings, as text by name.
    """

    what: str
    problem: tuple[type[Exception], str] | None
    digest: tuple[int, ...]
    settings: Mapping[str, str]


def validate_across_ranks(
    group: Group,
    lines: Sequence[str],
    problem: Exception | None,
    what: str = "agrees",
    settings: Mapping[str, object] | None = None,
) -> None:
    """Raise on every rank if anything is wrong on any, or if ranks differ.

    If all is well this is one all-reduce of digests, independent of the number of lines.

    Args:
        group: the ranks.
        lines: one text per item that all ranks must share, such as a weight.
        problem: an error on this rank, or None.
        what: the call in progress, as a verb.
        settings: other values that all ranks must share, by name.

    Raises RuntimeError for ranks in different calls; the problem of the first rank that has one,
    with the rank in its message if there are several ranks; or ValueError naming the first line
    that differs, or every setting that differs.
    """
    check_same_call(group, what)
    shown = {name: repr(value) for name, value in (settings or {}).items()}
    digest = _words("\n".join(lines))
    words = [int(problem is not None), *_words(what), *digest, *_words(str(shown))]
    smallest, largest = range_over_ranks(group, words, f"digests as this rank {what}")
    if smallest == largest and not largest[0]:
        return
    # The class is sent to the other ranks, which raise it with a text alone, so a subclass with
    # another constructor does not do.
    kind = next((kind for kind in (TypeError, ValueError) if isinstance(problem, kind)), RuntimeError)
    described_problem = None if problem is None else (kind, str(problem))
    _raise_difference(group, Reply(what, described_problem, digest, shown), lines)


def largest_of_ranks(group: Group, values: Sequence[int], what: str) -> list[int]:
    """The element-wise maximum of the ranks' integers. `what` says in errors what they are."""
    tensor = torch.tensor(values, dtype=torch.int64, device=group.device)
    group.all_reduce_max(tensor, what)
    largest: list[int] = tensor.tolist()
    return largest


def range_over_ranks(group: Group, values: Sequence[int], what: str) -> tuple[list[int], list[int]]:
    """The element-wise minimum and maximum of the ranks' integers, by one all-reduce: the values
    are the same on all ranks where the two are equal. `what` says in errors what they are.
    """
    # A maximum alone shows no equality, so the negatives are reduced as well.
    largest = largest_of_ranks(group, [*values, *(-value for value in values)], what)
    return [-negated for negated in largest[len(values) :]], largest[: len(values)]


def raise_together(groups: Sequence[Group], problem: Exception | None, what: str) -> None:
    """Raise on all ranks of a mesh if there is a problem on any of them: a rank that has one raises
    it, the others raise ValueError.

    `groups` are the groups of this rank, one per dimension of the mesh, and `what` is the call, as
    a verb.
    """
    has_problem = int(problem is not None)
    # A maximum along one dimension after the other is the maximum over the whole mesh.
    for group in groups:
        if group.size > 1:
            (has_problem,) = largest_of_ranks(group, [has_problem], f"whether a rank that {what} has a problem")
    if problem is not None:
        raise problem
    if has_problem:
        raise ValueError(f"another rank that {what} has been given one that does not fit, and its error says why")


def check_same_call(group: Group, what: str) -> None:
    """In debug mode, raise RuntimeError on every rank unless all ranks make this call now."""
    if debugging() and group.size > 1:
        calls = group.all_gather_object(_Call(what), f"calls as this rank {what}")
        # If another rank is in an all_gather_object of the user's program, its object arrives here.
        _check_calls([call.what if isinstance(call, _Call) else "gathers objects" for call in calls])


@dataclass(frozen=True)
class _Call:
    what: str


def _check_calls(by_rank: list[str]) -> None:
    for rank, what in enumerate(by_rank):
        if what != by_rank[0]:
            raise RuntimeError(
                f"ranks make different calls: rank 0 {by_rank[0]}, rank {rank} {what}; every rank makes the same calls in the "
                "same order"
            )


def from_rank_0(group: Group, work: Callable[[], Any], what: str) -> Any:
    """Run `work` on rank 0 and return its result on every rank; its error is raised on every
    rank.
    """
    result, problem = None, None
    if group.rank == 0:
        try:
            result = work()
        except Exception as error:
            problem = error
    validate_across_ranks(group, [], problem, what)
    return group.broadcast_object(result, f"rank 0's result as this rank {what}")


def _raise_difference(group: Group, own: Reply, lines: Sequence[str]) -> NoReturn:
    """Raise the error that `validate_across_ranks` describes. All ranks of the group call it."""
    replies: list[Reply] = group.all_gather_object(own, "what differs between ranks")
    _check_calls([reply.what for reply in replies])
    for rank, reply in enumerate(replies):
        if reply.problem is not None:
            kind, text = reply.problem
            raise kind(text if group.size == 1 else f"rank {rank}: {text}")
    first = replies[0]
    for rank, reply in enumerate(replies):
        if reply.digest != first.digest:
            # Lines can be long, so they are sent only now, and from two ranks only.
            lines_of_rank_0 = group.broadcast_object(list(lines), "a rank's weights", 0)
            lines_of_rank = group.broadcast_object(list(lines), "a rank's weights", rank)
            _raise_other_lines(lines_of_rank_0, lines_of_rank, rank)
    rank = next(rank for rank, reply in enumerate(replies) if reply.settings != first.settings)
    ours, theirs = first.settings, replies[rank].settings
    different = [
        f"{name} is {ours.get(name, 'not set')} on rank 0 and {theirs.get(name, 'not set')} on rank {rank}"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]
    raise ValueError(f"settings differ between ranks: {', '.join(different)}")


def _raise_other_lines(first: Sequence[str], lines: Sequence[str], rank: int) -> NoReturn:
    if len(lines) != len(first):
        raise ValueError(f"rank 0 passes {len(first)} weights and rank {rank} {len(lines)}: all pass the same list")
    pairs = enumerate(zip(first, lines, strict=True))
    index, (expected, actual) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
    raise ValueError(f"weight {index} is {expected} on rank 0 and {actual} on rank {rank}: all pass the same list")


def _words(text: str) -> tuple[int, ...]:
    """A digest of a text, as integers whose negatives fit into 64 bits."""
    digest = hashlib.sha256(text.encode()).digest()
    # Two of the 64 bits are dropped, so that the negative of a word is an int64 too.
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "big") >> 2 for i in range(WORDS))
