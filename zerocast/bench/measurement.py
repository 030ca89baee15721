"""Measurement: one row as one implementation did it; Failure: what could not be measured, and why."""

from dataclasses import dataclass
from functools import cached_property

from zerocast.bench.clock import Times
from zerocast.bench.row import Row, Target


@dataclass(frozen=True)
class Measurement:
    """`by` is a backend of ours, or a peer. `checked` names the workload on which ours wrote the bytes of the reference."""

    row: Row
    by: str
    times: Times
    launches: int | None
    checked: str | None

    @property
    def ms(self) -> float:
        """The time that the row is about."""
        return self.times.wall_ms if self.row.clock == "wall" else self.times.device_ms

    @cached_property
    def moved(self) -> int:
        """Bytes that must move, whoever does the work."""
        return self.row.moved

    @property
    def rate(self) -> float:
        """GB/s of the bytes that must move; what an implementation moves beyond them does not count."""
        return self.moved / self.ms / 1e6

    def floor_ms(self, copy_rate: float) -> float:
        """The time in which a copy at `copy_rate` GB/s moves as many bytes."""
        return self.moved / copy_rate / 1e6

    def over_floor(self, copy_rate: float) -> float:
        """Time over floor; below 1 where reads prevail, which run faster than a copy."""
        return self.ms / self.floor_ms(copy_rate)


@dataclass(frozen=True)
class Failure:
    """A row that `by` did not do, with its reason. Of a peer it is a fact, of ours an error."""

    row: Row
    by: str
    reason: str
    ours: bool


@dataclass(frozen=True)
class Verdict:
    """A target, in words and as figures: `reached` must be at most `limit`, and `host_ms` at most its limit where there is one."""

    text: str
    limit: float
    reached: float
    met: bool


def judge(measurement: Measurement, target: Target, copy_rate: float, other_ms: float | None) -> Verdict | None:
    """Hold a measurement against its target; `other_ms` is the time of the row that the target names. None without that time."""
    if target.row is None:
        text, reached = f"≤ {target.limit:g} x floor", measurement.over_floor(copy_rate)
    elif other_ms is not None:
        text, reached = (
            f"≤ {target.limit:g} x {target.share:g} of {target.row}",
            measurement.ms / (target.share * other_ms),
        )
    else:
        return None
    met = reached <= target.limit
    if target.host_ms is not None:
        text += f", host < {target.host_ms:g} ms"
        met = met and measurement.times.host_ms < target.host_ms
    return Verdict(text, target.limit, reached, met)
