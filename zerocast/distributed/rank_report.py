"""RankReport: the call and the status that a rank sends along with a collective of other data.
Ranks compare these reports (`Comparison`), so they agree without another collective.

A report is a status, and the number of a cast or a digest of a call. A *call* is the text that
describes what a rank does in the collective: which plan casts, in which step, with which learning
rates. Ranks with different calls have combined data that do not belong together. A report has two
encodings:

* **A header of gathered bytes**, under FSDP2: int32 `[2]`, status and number of the cast. Every
  rank reads the reports of all.
* **Numbers next to the packed amaxes** of a plan, whose maximum every rank gets: a flag for each
  weight, which is 1 for NOT_FINITE, then a digest of the call and its negative. The maxima of the
  two are the largest digest of all ranks and the negative of the smallest, which are the reports of
  the two ranks that differ most. The buffer may be bf16, which has every integer only up to 256.
"""

import enum
import functools
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zerocast.distributed.agreement import first_of, validate_across_ranks
from zerocast.distributed.group import Group
from zerocast.distributed.late_copy import LateCopies
from zerocast.weight.validity import InvalidWeights

# Digests of calls are below this, since the buffer of amaxes may be bf16.
DIGESTS = 128

# A rank that cannot make its call reports this number in place of a digest.
REFUSED = DIGESTS


class ShardStatus(enum.IntEnum):
    """The state of the masters of a rank since its last cast."""

    CLEAN = 0
    WRITTEN = 1
    # A rank without rows agrees with every other.
    EMPTY = 2
    # A step or a load failed partway.
    PARTIAL = 3
    # CLEAN, and masters of the last cast are NaN or Inf.
    NOT_FINITE = 4
    # This rank could not make the last cast.
    REFUSED = 5
    # This rank made the last cast, with amaxes that another rank could not contribute to.
    REFUSED_ELSEWHERE = 6
    # This rank made the last cast, before which replicas have not made the same casts.
    REPLICAS_DIFFER = 7

    @property
    def may_be_written(self) -> bool:
        """True if this rank has written to its masters since the cast, or has none."""
        return self in (ShardStatus.WRITTEN, ShardStatus.EMPTY)


# The statuses that need no comparison of ranks.
_QUIET = {ShardStatus.CLEAN, ShardStatus.EMPTY}


class RankReport(NamedTuple):
    """The report of one rank, in the order of a header.

    Attributes:
        status: a ShardStatus.
        call: the number of its cast, or a digest of its call.
    """

    status: int
    call: int


class Comparison:
    """The reports of several ranks, compared."""

    def __init__(self, reports: Sequence[Sequence[int]]) -> None:
        # Plain numbers, since every gather is compared and few need more than `all_clean`.
        self._reports = reports

    @functools.cached_property
    def reports(self) -> list[RankReport]:
        """The reports in rank order. Only two if they were reduced: the smallest and the
        largest.
        """
        return list(map(RankReport._make, self._reports))

    @staticmethod
    def of_headers(headers: Tensor) -> "Comparison":
        """Compare headers, int32 `[ranks, 2]`, of one weight or of several behind each other."""
        return Comparison(headers.tolist())

    @staticmethod
    def of_maxima(flags: Sequence[float], digests: Sequence[float]) -> "Comparison":
        """Compare the maxima of all flags, and of a digest and its negative."""
        finite = ShardStatus.NOT_FINITE if any(flags) else ShardStatus.CLEAN
        largest, negated = digests
        calls = int(largest), -int(negated)
        return Comparison([RankReport(ShardStatus.REFUSED if call == REFUSED else finite, call) for call in calls])

    @property
    def all_clean(self) -> bool:
        """True if all ranks are in the same call and no status needs a closer look."""
        statuses, calls = zip(*self._reports, strict=True)
        return len({*calls}) == 1 and _QUIET.issuperset(statuses)

    @property
    def is_same_call(self) -> bool:
        """True if all ranks are in the same call, or sent bytes of the same cast."""
        first = self.reports[0].call
        return all(report.call == first for report in self.reports)

    def ranks(self, *statuses: ShardStatus) -> list[int]:
        """Return the ranks that have one of these statuses."""
        return [rank for rank, report in enumerate(self.reports) if report.status in statuses]

    @property
    def may_be_written(self) -> bool:
        """True if every rank that has masters has written to them since the cast."""
        return all(ShardStatus(report.status).may_be_written for report in self.reports)


class CastReports:
    """The reports of a plan's ranks, which are reduced with the amaxes of each cast.

    A count of casts would always agree, since the n-th cast of one rank is reduced with the n-th
    cast of another. The digest therefore covers the caller's step, learning rates and clipping.

    The flags report masters that are NaN or Inf, which the loss may not show: a format without a
    code for NaN makes a finite weight of it, and Inf saturates in some formats.

    On a CPU the calls are compared as soon as they are reduced, the flags before the next cast. On
    a GPU, unless `raises_together`, one copy after the cast brings both to the CPU. It arrives on
    each rank at a different time, so all ranks read it at the same later call: a rank that raised
    alone would leave the others waiting in their next collective.

    Args:
        group: the ranks of the all-reduce.
        numbers: the part of the packed amaxes at a fixed address, a flag for each of `names`, then
            the two numbers of the call, or none.
        names: the weights that have flags.
        raises_together: True to compare on a GPU as on a CPU, which waits for the device.

    Attributes:
        compares_calls: True if the reports contain digests of calls.
        reads_late: True if the CPU reads the reports of a cast at a later call.
    """

    def __init__(self, group: Group, numbers: Tensor, names: Sequence[str], raises_together: bool = False) -> None:
        self._group = group
        self._names = names
        self._numbers = numbers
        self._digests = numbers[len(names) :]
        self.compares_calls = self._digests.numel() > 0
        # The last call that was announced, and whether the numbers still hold its digest, which the
        # all-reduce overwrites.
        self._call = ""
        self._is_announced = False
        # The problem because of which this rank could not make its last failed call.
        self._problem: Exception | None = None
        self.reads_late = _is_on_gpu(numbers) and not raises_together
        self._late = LateCopies(numbers)
        # True if the flags of the last cast were not read yet. Unused if reports are read late.
        self._has_unread = False

    def announce(self, call: str) -> None:
        """Store the digest of the call that this rank is about to make, before a cast. `call` is a
        verb phrase, such as "casts by plan 1 of its group".
        """
        if not self.compares_calls or (self._is_announced and call == self._call):
            return
        self._call = call
        self._write(_digest(call))
        self._is_announced = True

    def refuse(self, problem: Exception) -> None:
        """After `announce`, say that this rank cannot make its call because of a problem, which all
        ranks raise once they have compared the calls.
        """
        self._problem = problem
        self._write(REFUSED)

    @property
    def all_refused(self) -> bool:
        """True if no rank could make the last call. Waits for the device."""
        comparison = Comparison.of_maxima([], self._digests.tolist())
        return len(comparison.ranks(ShardStatus.REFUSED)) == len(comparison.reports)

    def _write(self, digest: int) -> None:
        # One launch writes both numbers: linspace of two elements is (digest, -digest).
        torch.linspace(digest, -digest, 2, out=self._digests)

    def after_reduction(self) -> None:
        """After the all-reduce, compare the calls on a CPU. On a GPU this may be the capture of a
        graph, during which the CPU cannot read them.
        """
        self._is_announced = False
        if self.compares_calls and not self.reads_late:
            self._compare([], self._digests.tolist())

    def send(self) -> None:
        """After a cast, start the copy of its reports to the CPU."""
        self._is_announced = False
        if self.reads_late:
            if self._numbers.numel():
                self._late.send()
        else:
            self._has_unread = True

    def forget(self) -> None:
        """Drop unread reports of earlier casts. Called when all ranks are about to overwrite their
        masters.
        """
        self._late.forget()
        self._has_unread = False

    def differ(self) -> bool:
        """Return True if ranks were in different calls in a cast that `check` has not read yet.
        Waits for that cast on a GPU. On a CPU the cast has raised by itself, so this is False.
        """
        if not self.reads_late or not self.compares_calls:
            return False
        digests = [numbers[len(self._names) :].tolist() for numbers in self._late.peek()]
        return not all(Comparison.of_maxima([], each).is_same_call for each in digests)

    def check(self, casts_in_flight: int = 0) -> None:
        """Compare the reports that were sent and not read yet. On a GPU this waits for them.

        On every rank, raises InvalidWeights for masters that were not finite, once per cast,
        RuntimeError for ranks that were in different calls, and the problem of a rank that could
        not make its call.

        Args:
            casts_in_flight: the number of the last casts that are not waited for, 0 or 1.
        """
        if self.reads_late:
            unread = self._late.pop(casts_in_flight)
        else:
            unread = [self._numbers] if self._has_unread and not casts_in_flight else []
            self._has_unread = self._has_unread and not unread
        flags = len(self._names)
        for copy in unread:
            numbers = copy.tolist()
            # All zeros, as in most casts of one process: there is nothing to compare.
            if any(numbers):
                self._compare(numbers[:flags], numbers[flags:])

    def _compare(self, flags: Sequence[float], digests: Sequence[float]) -> None:
        """Raise on every rank if the calls differ, after exchanging them with the problems of
        ranks, or for masters that are not finite.
        """
        comparison = Comparison.of_maxima(flags, digests or (0, 0))
        if not comparison.is_same_call:
            is_refused = bool(comparison.ranks(ShardStatus.REFUSED))
            # Digests do not name the calls. This exchanges the calls and raises with both.
            validate_across_ranks(self._group, [], self._problem if is_refused else None, self._call)
            raise RuntimeError(
                f"the amaxes of a cast were reduced with the amaxes of a different call: this rank {self._call}; every rank "
                "makes the same calls in the same order"
            )
        if comparison.ranks(ShardStatus.NOT_FINITE):
            names = [name for name, flag in zip(self._names, flags, strict=True) if flag]
            raise not_finite_error(names, f"{len(names)} of {len(self._names)} weights")


def not_finite_error(names: Sequence[str], count: str) -> InvalidWeights:
    """Return the error for masters of the weights `names` that are not finite."""
    return InvalidWeights(
        f"the masters of {count} were NaN or Inf in the last cast: {first_of(names)}. Results computed with these are wrong, "
        "though formats without a NaN code do not show it",
        "",
        "load a checkpoint, and find out what wrote the masters (a learning rate, an optimizer of your own, a state that was "
        "loaded)",
    )


def _is_on_gpu(numbers: Tensor) -> bool:
    """Return True if the CPU would wait for the device to read them. Tests replace this."""
    return numbers.is_cuda


def _digest(call: str) -> int:
    """Return a number below DIGESTS. Different calls may collide in one step, but then most likely
    not in the next.
    """
    return hashlib.blake2b(call.encode(), digest_size=1).digest()[0] % DIGESTS
