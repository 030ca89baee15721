"""Measurement: one row by one implementation; Failure: a row without one; Verdict: its target."""

from dataclasses import dataclass
from functools import cached_property

import torch

from zerocast.bench.clock import Clock, Times
from zerocast.bench.row import Row, Target


@dataclass(frozen=True)
class Measurement:
    """One row measured by one implementation.

    Attributes:
        by: the name of a backend of ours, or of a peer.
        launches: kernels, fills and copies of one call.
        checked: the workload on which our bytes were compared with those of the reference.
    """

    row: Row
    by: str
    times: Times
    launches: int | None
    checked: str | None

    @property
    def ms(self) -> float:
        """The time that the row reports: wall time or device time."""
        return self.times.wall_ms if self.row.clock == "wall" else self.times.device_ms

    @cached_property
    def moved(self) -> int:
        """The bytes that any implementation must move."""
        return self.row.moved

    @property
    def rate(self) -> float:
        """GB/s of the bytes that must move; any further traffic does not count."""
        return self.moved / self.ms / 1e6

    def floor_ms(self, copy_rate: float) -> float:
        """The milliseconds in which a copy at `copy_rate` GB/s moves as many bytes."""
        return self.moved / copy_rate / 1e6

    def over_floor(self, copy_rate: float) -> float:
        """The time divided by its floor; it can be below 1, as reads are faster than a copy."""
        return self.ms / self.floor_ms(copy_rate)


@dataclass(frozen=True)
class Failure:
    """A row that `by` could not do, and the reason; an error if `ours`, a fact about a peer if
    not.
    """

    row: Row
    by: str
    reason: str
    ours: bool


@dataclass(frozen=True)
class Verdict:
    """A target in words, its limit, the value reached and whether the target is met."""

    text: str
    limit: float
    reached: float
    met: bool


def judge(measurement: Measurement, target: Target, copy_rate: float, other_ms: float | None) -> Verdict | None:
    """Compare a measurement with its target.

    `other_ms` is the time of the row that the target refers to; None is returned if that is
    missing.
    """
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


def copy_rate(clock: Clock, device: torch.device, nbytes: int) -> float:
    """GB/s of a copy of `nbytes` on the device, counting bytes read plus bytes written."""
    source = torch.full((nbytes,), 1, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / clock.time(lambda: target.copy_(source)).device_ms / 1e6
