"""Agreement: compares what all ranks must share; a problem on one rank raises on every rank."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from zerocast.distributed.group import Group
from zerocast.distributed.late_copy import LateCopy
from zerocast.weight.validity import debugging

DIGESTS = 128  # bf16 has every integer up to 256


WORDS = 4  # of 62 bits: the digest of a text


@dataclass(frozen=True)
class Reply:
    """One rank's message to the others where they differ: its call, (class, text) of its problem,
    a digest of its lines and its settings.
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

    `problem` is an error that this rank found, `lines` describe the items that all ranks must
    share, `settings` what else they must, by name, and `what` is the call in progress, as a verb.
    If all is well this is one all-reduce of digests, whatever the number of ranks and lines. Raises
    RuntimeError for ranks in different calls; the problem of the first rank that has one, with the
    rank in its message if there are several ranks; or ValueError naming the first line that
    differs, or every setting that does.
    """
    check_same_call(group, what)
    digest, shown = _words("\n".join(lines)), {name: repr(value) for name, value in (settings or {}).items()}
    words = [*_words(what), *digest, *_words(str(shown))]
    wrong = int(problem is not None)
    largest = largest_of_ranks(group, [wrong, *words, *(-word for word in words)], f"digests as this rank {what}")
    highest, negated = largest[1 : len(words) + 1], largest[len(words) + 1 :]
    if not largest[0] and all(high == -low for high, low in zip(highest, negated, strict=True)):
        return
    kind = next((kind for kind in (TypeError, ValueError) if isinstance(problem, kind)), RuntimeError)
    found = None if problem is None else (kind, str(problem))
    _raise_difference(group, Reply(what, found, digest, shown), lines)


def largest_of_ranks(group: Group, values: Sequence[int], what: str) -> list[int]:
    """The element-wise largest of the ranks' integers; `what` they are, for errors."""
    tensor = torch.tensor(values, dtype=torch.int64, device=group.device)
    group.all_reduce_max(tensor, what)
    largest: list[int] = tensor.tolist()
    return largest


def raise_together(groups: Sequence[Group], problem: Exception | None, what: str) -> None:
    """Raise on all ranks of a mesh if there is a problem on any of them: its own on a rank that
    has one, ValueError on the others.

    `groups` are those of each dimension of the mesh, and `what` is the call, as a verb.
    """
    wrong = int(problem is not None)
    for group in groups:
        if group.size > 1:
            (wrong,) = largest_of_ranks(group, [wrong], f"whether a rank that {what} has a problem")
    if problem is not None:
        raise problem
    if wrong:
        raise ValueError(f"another rank that {what} has been given one that does not fit, and its error says why")


def check_same_call(group: Group, what: str) -> None:
    """In debug mode, raise RuntimeError on every rank unless all ranks make this call now.

    A program that gathers objects of its own meanwhile is told apart.
    """
    if debugging() and group.size > 1:
        calls = group.all_gather_object(_Call(what), f"calls as this rank {what}")
        _check_calls([call.what if isinstance(call, _Call) else "gathers objects" for call in calls])


@dataclass(frozen=True)
class _Call:
    what: str


class SameCall:
    """Checks that all ranks make the same call, by two numbers that ride in the amax all-reduce.

    The numbers are a digest of the call and its negative. Their maxima are the largest digest of
    all ranks and the negative of the smallest, so every rank sees whether the digests differ,
    without a further collective. A mere count of casts would always agree, since the n-th cast of
    one rank meets the n-th of another; the digest therefore covers the caller's step, learning
    rates and clipping. On a CPU the numbers are checked at once. On a GPU they are copied to the
    host behind the step and checked before the next one, so that no step waits.
    """

    def __init__(self, group: Group, slots: Tensor) -> None:
        self._group, self._slots, self._call = group, slots, ""
        self._announced = False
        self._late = LateCopy(slots)

    def announce(self, call: str) -> None:
        """Before a cast, store the digest of this rank's call, a verb phrase.

        It takes one launch, and none to announce the same call again.
        """
        if self._announced and call == self._call:
            return
        digest, self._call = _digest(call), call
        torch.linspace(digest, -digest, 2, out=self._slots)
        self._announced = True

    def reduced(self) -> None:
        """After the all-reduce, check on a CPU; a GPU may be capturing a graph and checks later."""
        self._announced = False
        if not self._late.is_late:
            self._check(self._slots)

    def send(self) -> None:
        """After a cast on a GPU, start copying the numbers to the host."""
        self._announced = False
        if self._late.is_late:
            self._late.send()

    def forget(self) -> None:
        """Skip the check of the numbers sent so far."""
        self._late.forget()

    def check_sent(self) -> None:
        """Before the next cast, check the numbers that were sent; the device has had a step of
        work since.
        """
        numbers = self._late.take()
        if numbers is not None:
            self._check(numbers)

    def _check(self, slots: Tensor) -> None:
        """Raise RuntimeError on every rank if the digests differ, after exchanging the calls."""
        largest, negated = slots.tolist()
        if largest != -negated:
            validate_across_ranks(self._group, [], None, self._call)
            raise RuntimeError(
                f"the amaxes of a cast were reduced with those of another call: this rank {self._call}; every rank makes the same "
                "calls in the same order"
            )


def _digest(call: str) -> int:
    """A number below DIGESTS; calls that collide in one step most likely differ in the next."""
    return hashlib.blake2b(call.encode(), digest_size=1).digest()[0] % DIGESTS


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
    """Raise what `validate_across_ranks` found. Every rank has one reply, and lines travel from two
    ranks only.
    """
    replies: list[Reply] = group.all_gather_object(own, "what differs between ranks")
    _check_calls([reply.what for reply in replies])
    for rank, reply in enumerate(replies):
        if reply.problem is not None:
            wrong, text = reply.problem
            raise wrong(text if group.size == 1 else f"rank {rank}: {text}")
    first = replies[0]
    for rank, reply in enumerate(replies):
        if reply.digest != first.digest:
            by_rank_0, found = (group.broadcast_object(list(lines), "a rank's weights", root) for root in (0, rank))
            _raise_other_lines(by_rank_0, found, rank)
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
    index, (expected, found) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
    raise ValueError(f"weight {index} is {expected} on rank 0 and {found} on rank {rank}: all pass the same list")


def _words(text: str) -> tuple[int, ...]:
    """A digest of a text, as integers whose negatives fit into 64 bits."""
    digest = hashlib.sha256(text.encode()).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "big") >> 2 for i in range(WORDS))
