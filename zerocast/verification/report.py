"""VerifyReport: the result of comparing live bytes with their masters, the same on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass


class VerificationError(RuntimeError):
    """Live bytes differ from the cast of their masters, or masters are not finite; the message is
    the report.
    """


@dataclass(frozen=True)
class Difference:
    """One buffer of one weight on one rank that differs from the expected bytes.

    Attributes:
        buffer: a name in `zerocast.formats.layout.BUFFERS`.
        wrong: the number of bytes that differ, of `total`.
        offset: the byte offset of the first difference in the buffer.
        found: the byte there.
        expected: the byte that the master casts to.
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
    """The result of `zerocast.verify`.

    Attributes:
        weights: the number of weights compared.
        nbytes: the bytes compared on each rank.
        ranks: the number of ranks.
        differences: every buffer that differs on any rank.
        without_masters: quantized weights that were not compared, since some masters have no owner
            here.
        not_finite: (name, number of NaN and Inf) of masters. They are cast as formats say, so their
            bytes are no difference.
        allow_nonfinite: masters that are not finite are reported and nothing else.
    """

    weights: int
    nbytes: int
    ranks: int
    differences: tuple[Difference, ...]
    without_masters: tuple[str, ...] = ()
    not_finite: tuple[tuple[str, int], ...] = ()
    allow_nonfinite: bool = False

    @staticmethod
    def of(parts: "Sequence[VerifyReport]", without: tuple[str, ...], allow_nonfinite: bool = False) -> "VerifyReport":
        """Merge reports into one; `ranks` is their largest number of ranks, 1 of no report."""
        return VerifyReport(
            sum(part.weights for part in parts),
            sum(part.nbytes for part in parts),
            max((part.ranks for part in parts), default=1),
            tuple(difference for part in parts for difference in part.differences),
            (*without, *(name for part in parts for name in part.without_masters)),
            tuple(found for part in parts for found in part.not_finite),
            allow_nonfinite,
        )

    @property
    def ok(self) -> bool:
        """True if no buffer differs on any rank, and masters are finite or may be otherwise."""
        return not self.differences and (self.allow_nonfinite or not self.not_finite)

    def __str__(self) -> str:
        what = f"{self.weights:,} weights, {self.nbytes:,} bytes on each of {self.ranks} ranks"
        differ = f"{len(self.differences)} buffers differ"
        found = differ if self.differences else "all are what the masters cast to"
        masters = [
            f"the master of {name} has {count:,} elements that are NaN or Inf" for name, count in self.not_finite
        ]
        return "\n".join([f"{what}: {found}", *map(str, self.differences), *masters])

    def raise_for_differences(self) -> None:
        """Raise VerificationError, with the report as its message, unless the report is `ok`."""
        if not self.ok:
            raise VerificationError(str(self))
