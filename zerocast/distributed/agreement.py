"""Agreement: compares what all ranks must share; a problem on one rank raises on every rank."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerocast.distributed.group import Group
from zerocast.weight.freshness import debugging

DIGESTS = 128  # bf16 has every integer up to 256


@dataclass(frozen=True)
class Reply:
    """One rank's part of an exchange: its call, (class, text) of its problem, a digest and a
    payload.
    """

    what: str
    problem: tuple[type[Exception], str] | None
    digest: str
    payload: Any


def validate_across_ranks(
    group: Group, lines: Sequence[str], problem: Exception | None, payload: Any = None, what: str = "agrees"
) -> list[Any]:
    """Exchange `payload` over the group, if all is well everywhere; returns the payloads by rank.

    `problem` is an error that this rank found, `lines` describe the items that all ranks must
    share, and `what` is the call in progress, as a verb. Raises RuntimeError for ranks in different
    calls; the problem of the first rank that has one, with the rank in its message if there are
    several ranks; or ValueError naming the first line that differs.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    kind = next((kind for kind in (TypeError, ValueError) if isinstance(problem, kind)), RuntimeError)
    found = None if problem is None else (kind, str(problem))
    replies: list[Reply] = group.all_gather_object(Reply(what, found, digest, payload), f"objects as this rank {what}")
    _check_calls([reply.what if isinstance(reply, Reply) else "gathers objects" for reply in replies])
    for rank, reply in enumerate(replies):
        if reply.problem is not None:
            wrong, text = reply.problem
            raise wrong(text if group.size == 1 else f"rank {rank}: {text}")
    if len({reply.digest for reply in replies}) > 1:
        _raise_difference(group.all_gather_object(list(lines)))
    return [reply.payload for reply in replies]


def check_same_call(group: Group, what: str) -> None:
    """In debug mode, raise RuntimeError on every rank unless all ranks make this call now."""
    if debugging() and group.size > 1:
        validate_across_ranks(group, [], None, what=what)


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
        self._group, self._slots, self._says = group, slots, ""
        self._announced = self._sent = False
        self._is_late = slots.is_cuda
        if self._is_late:
            self._pinned = torch.empty(slots.shape, dtype=slots.dtype, pin_memory=True)
            self._arrived = torch.cuda.Event()

    def announce(self, says: str) -> None:
        """Before a cast, store the digest of this rank's call, a verb phrase.

        It takes one launch, and none to announce the same call again.
        """
        if self._announced and says == self._says:
            return
        digest, self._says = _digest(says), says
        torch.linspace(digest, -digest, 2, out=self._slots)
        self._announced = True

    def reduced(self) -> None:
        """After the all-reduce, check on a CPU; a GPU may be capturing a graph and checks later."""
        self._announced = False
        if not self._is_late:
            self._check(self._slots)

    def send(self) -> None:
        """After a cast on a GPU, start copying the numbers to the host."""
        self._announced = False
        if self._is_late:
            self._pinned.copy_(self._slots, non_blocking=True)
            self._arrived.record()
            self._sent = True

    def forget(self) -> None:
        """Skip the check of the numbers sent so far."""
        self._sent = False

    def check_sent(self) -> None:
        """Before the next cast, check the numbers that were sent; the device has had a step of
        work since.
        """
        if self._sent:
            self._arrived.synchronize()
            self._sent = False
            self._check(self._pinned)

    def _check(self, slots: Tensor) -> None:
        """Raise RuntimeError on every rank if the digests differ, after exchanging the calls."""
        largest, negated = slots.tolist()
        if largest != -negated:
            validate_across_ranks(self._group, [], None, what=self._says)
            raise RuntimeError(
                f"the amaxes of a cast were reduced with those of another call: this rank {self._says}; every rank makes the same "
                "calls in the same order"
            )


def _digest(says: str) -> int:
    """A number below DIGESTS; calls that collide in one step most likely differ in the next."""
    return hashlib.blake2b(says.encode(), digest_size=1).digest()[0] % DIGESTS


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
    return validate_across_ranks(group, [], problem, result, what)[0]


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
