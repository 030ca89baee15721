"""VerifyReport: what a comparison of live bytes with their masters found, the same value on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass


class VerificationError(RuntimeError):
    """Live bytes are not what their masters cast to; the message is the report."""


@dataclass(frozen=True)
class Difference:
    """One buffer of one weight on one rank that does not hold what it should.

    `buffer` is a name in `zerocast.formats.layout.BUFFERS`, `wrong` of its `total` bytes differ, `offset` is that of the first
    one from the start of the buffer, which holds `found` where `expected` was expected.
    """

    name: str
    format: str
    rank: int
    buffer: str
    wrong: int
    total: int
    offset: int
    found: int
    expected: int

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.format}) on rank {self.rank}: {self.buffer} differs in {self.wrong:,} of {self.total:,} "
            f"bytes, first at {self.offset:,}: {self.found:#04x} where {self.expected:#04x} is expected"
        )


@dataclass(frozen=True)
class VerifyReport:
    """What `zerocast.verify` compared: so many weights, so many bytes on each rank; and every buffer that differs on any rank.

    `without_masters` names the quantized weights whose masters nobody here owns, or not all of; they were not compared.
    `not_finite` counts the NaN and Inf in masters, by weight: no difference, since they are cast like any other value.
    """

    weights: int
    nbytes: int
    ranks: int
    differences: tuple[Difference, ...]
    without_masters: tuple[str, ...] = ()
    not_finite: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(parts: "Sequence[VerifyReport]", without: tuple[str, ...]) -> "VerifyReport":
        """What several comparisons found together; `ranks` is the largest number of them."""
        return VerifyReport(
            sum(part.weights for part in parts),
            sum(part.nbytes for part in parts),
            max(part.ranks for part in parts),
            tuple(difference for part in parts for difference in part.differences),
            (*without, *(name for part in parts for name in part.without_masters)),
            tuple(found for part in parts for found in part.not_finite),
        )

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __str__(self) -> str:
        what = f"{self.weights:,} weights, {self.nbytes:,} bytes on each of {self.ranks} ranks"
        found = "all are what the masters cast to" if self.ok else f"{len(self.differences)} buffers differ"
        masters = [
            f"the master of {name} has {count:,} elements that are NaN or Inf" for name, count in self.not_finite
        ]
        return "\n".join([f"{what}: {found}", *map(str, self.differences), *masters])

    def raise_for_differences(self) -> None:
        """VerificationError, with the report as its message, if anything differs."""
        if self.differences:
            raise VerificationError(str(self))
