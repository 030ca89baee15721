"""Agreement between ranks: compare values that all ranks must share, and raise a problem of one
rank on every rank.

A rank that raised alone would leave the others waiting in their next collective.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch

from zerocast.distributed.group import Group
from zerocast.weight.validity import debugging

Result = TypeVar("Result")
# The digest of a text is this many integers of 62 bits.
WORDS = 4
# How many of several names or problems an error has.
SHOWN = 4


@dataclass(frozen=True)
class Reply:
    """One rank's message to the others once they know that something is wrong or differs.

    Attributes:
        what: the call in progress, as a verb.
        problem: (class, text) of the error on this rank, or None.
        digest: a digest of its lines.
        settings: its settings, as text keyed by name.
    """

    what: str
    problem: tuple[type[Exception], str] | None
    digest: tuple[int, ...]
    settings: Mapping[str, str]


def validate_across_ranks(
    ranks: Group | Sequence[Group],
    lines: Sequence[str],
    problem: Exception | None,
    what: str = "agrees",
    settings: Mapping[str, object] | None = None,
) -> None:
    """Raise on every rank if anything is wrong on any, or if ranks differ.

    If all is well this is one all-reduce of digests, independent of the number of lines.

    Args:
        ranks: a group, or the groups of this rank along each dimension of a mesh. The ranks of a
            mesh are numbered in its row-major order.
        lines: one text per item that all ranks must share, such as a weight.
        problem: an error on this rank, or None.
        what: the call in progress, as a verb.
        settings: other values that all ranks must share, keyed by name.

    Raises RuntimeError for ranks in different calls; the problem of the first rank that has one,
    with the rank in its message if there are several ranks; or ValueError naming the first line
    that differs, or every setting that differs.
    """
    mesh = [ranks] if isinstance(ranks, Group) else list(ranks)
    check_same_call(mesh, what)
    shown = {name: repr(value) for name, value in (settings or {}).items()}
    digest = _words("\n".join(lines))
    words = [int(problem is not None), *_words(what), *digest, *_words(str(shown))]
    smallest, largest = range_over_ranks(mesh, words, f"digests as this rank {what}")
    if smallest == largest and not largest[0]:
        return
    # The class is sent to the other ranks, which raise it with a text alone, so a subclass with its
    # own constructor would not work.
    kind = next((kind for kind in (TypeError, ValueError) if isinstance(problem, kind)), RuntimeError)
    # The text of other errors may need their class, such as the key of a KeyError.
    text = str(problem) if isinstance(problem, (TypeError, ValueError, RuntimeError)) else repr(problem)
    described_problem = None if problem is None else (kind, text)
    _raise_difference(mesh, Reply(what, described_problem, digest, shown), lines)


def largest_of_ranks(ranks: Group | Sequence[Group], values: Sequence[int], what: str) -> list[int]:
    """Return the element-wise maximum of the ranks' integers. `what` names them in errors."""
    mesh = [ranks] if isinstance(ranks, Group) else ranks
    # A group of one process sends nothing: its device is the CPU, which NCCL of another dimension
    # does not serve.
    sending = [group for group in mesh if group.size > 1]
    tensor = torch.tensor(values, dtype=torch.int64, device=sending[0].device if sending else None)
    # The maximum along each dimension in turn is the maximum over the full mesh.
    for group in sending:
        group.all_reduce_max(tensor, what)
    largest: list[int] = tensor.tolist()
    return largest


def range_over_ranks(ranks: Group | Sequence[Group], values: Sequence[int], what: str) -> tuple[list[int], list[int]]:
    """Return the element-wise minimum and maximum of the ranks' integers, by one all-reduce: the
    values are the same on all ranks where the two are equal. `what` names them in errors.
    """
    # A maximum by itself does not show equality, so the negatives are reduced as well.
    largest = largest_of_ranks(ranks, [*values, *(-value for value in values)], what)
    return [-negated for negated in largest[len(values) :]], largest[: len(values)]


def check_same_call(ranks: Group | Sequence[Group], what: str) -> None:
    """In debug mode, raise RuntimeError on every rank unless all ranks make this call now."""
    mesh = [ranks] if isinstance(ranks, Group) else ranks
    if debugging() and any(group.size > 1 for group in mesh):
        calls = _of_all_ranks(mesh, _Call(what), f"calls as this rank {what}")
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


def together(group: Group, work: Callable[[], Result], what: str) -> Result:
    """Run `work` on every rank and return its result. An error of one rank is raised on every rank.

    An error of one rank before a collective inside `work` would leave the others in that one.
    `what` is the call in progress, as a verb.
    """
    if group.size == 1:
        return work()
    results, problem = [], None
    try:
        results.append(work())
    except Exception as error:
        problem = error
    validate_across_ranks(group, [], problem, what)
    return results[0]


def each_together(group: Group, items: Iterator[Result], what: str) -> Iterator[Result]:
    """Yield the items, the same number on each rank. An error of one rank's iterator is raised on
    every rank.
    """
    try:
        while (item := together(group, partial(next, items, None), what)) is not None:
            yield item
    finally:
        # A generator may hold gathered memory for as long as it or the traceback of an error lives.
        if isinstance(items, Generator):
            items.close()


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


def _of_all_ranks(mesh: Sequence[Group], value: Any, what: str) -> list[Any]:
    """Return the values of all ranks of a mesh, in row-major order."""
    values = [value]
    for group in reversed(mesh):
        values = list(itertools.chain.from_iterable(group.all_gather_object(values, what)))
    return values


def _of_rank(mesh: Sequence[Group], rank: int, lines: list[str]) -> list[str]:
    """Return the lines of one rank of a mesh."""
    sizes = [group.size for group in mesh]
    for dim, group in enumerate(mesh):
        root = rank // math.prod(sizes[dim + 1 :]) % group.size
        lines = group.broadcast_object(lines, "a rank's weights", root)
    return lines


def _raise_difference(mesh: Sequence[Group], own: Reply, lines: Sequence[str]) -> NoReturn:
    """Raise the error that `validate_across_ranks` describes. All ranks of the mesh call it."""
    replies: list[Reply] = _of_all_ranks(mesh, own, "what differs between ranks")
    _check_calls([reply.what for reply in replies])
    for rank, reply in enumerate(replies):
        if reply.problem is not None:
            kind, text = reply.problem
            raise kind(text if len(replies) == 1 else f"rank {rank}: {text}")
    first = replies[0]
    for rank, reply in enumerate(replies):
        if reply.digest != first.digest:
            # Lines can be long, so they are sent only now, and from two ranks only.
            _raise_other_lines(_of_rank(mesh, 0, list(lines)), _of_rank(mesh, rank, list(lines)), rank)
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
    """Return a digest of a text, as integers whose negatives fit into 64 bits."""
    digest = hashlib.sha256(text.encode()).digest()
    # Two of the 64 bits are dropped, so that the negative of a word is an int64 too.
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "big") >> 2 for i in range(WORDS))


def first_of(texts: Sequence[str], separator: str = ", ") -> str:
    """Return the first of several names or problems for an error, and how many more there are."""
    more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return separator.join([*texts[:SHOWN], *more])
