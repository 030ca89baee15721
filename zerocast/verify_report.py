"""VerifyReport: what a comparison of live bytes with their masters found, the same value on every rank."""

from dataclasses import dataclass


class VerificationError(RuntimeError):
    """Live bytes are not what their masters cast to; the message is the report."""


@dataclass(frozen=True)
class Difference:
    """One buffer of one weight on one rank that does not hold what it should.

    `buffer` is a name in `zerocast.layout.BUFFERS`, `wrong` of its `total` bytes differ, `offset` is that of the first one from the
    start of the buffer, which holds `found` where `expected` was expected.
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

    `without_masters` names the quantized weights of a model whose masters nobody here owns; they were not compared.
    """

    weights: int
    nbytes: int
    ranks: int
    differences: tuple[Difference, ...]
    without_masters: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __str__(self) -> str:
        what = f"{self.weights:,} weights, {self.nbytes:,} bytes on each of {self.ranks} ranks"
        if self.ok:
            return f"{what}: all are what the masters cast to"
        return "\n".join([f"{what}: {len(self.differences)} buffers differ", *map(str, self.differences)])

    def raise_for_differences(self) -> None:
        """VerificationError, with the report as its message, if anything differs."""
        if self.differences:
            raise VerificationError(str(self))
