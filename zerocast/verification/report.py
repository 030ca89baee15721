"""VerifyReport: the result of comparing live bytes with their masters, the same on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass


class VerificationError(RuntimeError):
    """Raised if live bytes differ from the cast of their masters, or if masters are not finite. The
    message is the report.
    """


@dataclass(frozen=True)
class Difference:
    """One buffer of one weight on one rank that differs from the expected bytes.

    Attributes:
        name: the name of the weight.
        format: the format of the weight.
        rank: the rank.
        buffer: a name in `zerocast.formats.layout.BUFFERS`.
        wrong: the number of bytes that differ, of `total`.
        offset: the byte offset of the first difference in the buffer.
        found: the live byte at the offset.
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
        without_masters: quantized weights that were not compared, since some of their elements have
            no known master.
        not_finite: (name, number of NaN and Inf elements) of masters. Formats define the cast of
            such elements, so their bytes do not count as different.
        allow_nonfinite: True if masters that are not finite are reported but are not a failure.
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
        """Merge reports into one. `ranks` is the largest of their numbers of ranks, or 1."""
        return VerifyReport(
            weights=sum(part.weights for part in parts),
            nbytes=sum(part.nbytes for part in parts),
            ranks=max((part.ranks for part in parts), default=1),
            differences=tuple(difference for part in parts for difference in part.differences),
            without_masters=(*without, *(name for part in parts for name in part.without_masters)),
            not_finite=tuple(master for part in parts for master in part.not_finite),
            allow_nonfinite=allow_nonfinite,
        )

    @property
    def ok(self) -> bool:
        """True if no buffer differs on any rank, and all masters are finite or need not be."""
        return not self.differences and (self.allow_nonfinite or not self.not_finite)

    def __str__(self) -> str:
        compared = f"{self.weights:,} weights, {self.nbytes:,} bytes on each of {self.ranks} ranks"
        differ = f"{len(self.differences)} buffers differ"
        result = differ if self.differences else "all equal the cast of the masters"
        masters = [
            f"the master of {name} has {count:,} elements that are NaN or Inf" for name, count in self.not_finite
        ]
        return "\n".join([f"{compared}: {result}", *map(str, self.differences), *masters])

    def raise_for_differences(self) -> None:
        """Raise VerificationError, with the report as its message, unless the report is `ok`."""
        if not self.ok:
            raise VerificationError(str(self))
