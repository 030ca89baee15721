"""Report: all measurements of one run as JSON, and the comparison with a stored report."""

import datetime
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from zerocast.bench.clock import Clock, Times
from zerocast.bench.row import Row
from zerocast.checkpoint.store import read_bounded

SCHEMA = 1
# The largest stored report that is read.
MAX_BYTES = 2**26


@dataclass(frozen=True)
class Measurement:
    """One row measured by one implementation.

    Attributes:
        by: the name of a backend of ours, or of a peer.
        launches: kernels, fills and copies of one call.
        checked: the workload on which our bytes were compared with the reference's.
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
        """Return the milliseconds in which a copy at `copy_rate` GB/s moves the same number of
        bytes.
        """
        return self.moved / copy_rate / 1e6

    def over_floor(self, copy_rate: float) -> float:
        """Return the time divided by its floor; it can be below 1, as reads are faster than a
        copy.
        """
        return self.ms / self.floor_ms(copy_rate)


@dataclass(frozen=True)
class Failure:
    """A row that could not be measured.

    Attributes:
        by: the name of the backend or peer.
        reason: the error.
        ours: True if `by` is a backend of zerocast. The benchmark has then failed; otherwise the
            failure is only a fact about a peer.
    """

    row: Row
    by: str
    reason: str
    ours: bool


def copy_rate(clock: Clock, device: torch.device, nbytes: int) -> float:
    """Return the GB/s of a copy of `nbytes` on the device, counting bytes read plus bytes
    written.
    """
    source = torch.full((nbytes,), 1, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / clock.time(lambda: target.copy_(source)).device_ms / 1e6


@dataclass(frozen=True)
class CopyRate:
    """GB/s of a copy of `nbytes` on the device, before and after the rows; reads plus writes."""

    nbytes: int
    before: float
    after: float

    @property
    def rate(self) -> float:
        """The mean of both rates, with which the floors of the rows are computed."""
        return (self.before + self.after) / 2


@dataclass(frozen=True)
class Report:
    """All results of one run.

    Attributes:
        backend: the backend of zerocast that was measured.
        method: how times were taken, in words.
    """

    date: str
    backend: str
    machine: Mapping[str, str | int | None]
    settings: Mapping[str, Any]
    method: str
    copy: CopyRate
    measurements: tuple[Measurement, ...]
    failures: tuple[Failure, ...] = ()

    @cached_property
    def _ours(self) -> dict[str, Measurement]:
        return {m.row.name: m for m in self.measurements if m.by == self.backend}

    def over_ours(self, measurement: Measurement) -> float | None:
        """Return a peer's time divided by ours for the same row; None for our own measurements."""
        ours = self._ours.get(measurement.row.name)
        return None if measurement.by == self.backend or ours is None else measurement.ms / ours.ms

    @property
    def failed(self) -> bool:
        """True if a row of ours could not be measured or wrote wrong bytes."""
        return any(failure.ours for failure in self.failures)

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers, measured and derived, as JSON types; README.md lists the keys."""
        return {
            "schema": SCHEMA,
            "date": self.date,
            "backend": self.backend,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "method": self.method,
            "copy": {
                "bytes": self.copy.nbytes, "before_gbps": self.copy.before, "after_gbps": self.copy.after, "gbps": self.copy.rate
            },
            "rows": [self._line(measurement) for measurement in self.measurements],
            "failures": [
                {"row": f.row.name, "by": f.by, "reason": f.reason, "ours": f.ours} for f in self.failures
            ],
        }  # fmt: skip

    def _line(self, m: Measurement) -> dict[str, Any]:
        return {
            "row": m.row.name,
            "by": m.by,
            "workload": asdict(m.row.workload),
            "clock": m.row.clock,
            "ms": m.ms,
            "bytes": m.moved,
            "gbps": m.rate,
            "of_copy": m.rate / self.copy.rate,
            "floor_ms": m.floor_ms(self.copy.rate),
            "over_floor": m.over_floor(self.copy.rate),
            "launches": m.launches,
            **asdict(m.times),
            "over_ours": self.over_ours(m),
            "checked": m.checked,
        }


@dataclass(frozen=True)
class Regression:
    """A quantity of a row that is compared with a stored report.

    Attributes:
        before: the value in the stored report.
        now: the value of this run.
        unit: the text after a value.
    """

    row: str
    before: float
    now: float
    unit: str = "x floor"

    def __str__(self) -> str:
        return (
            f"{self.row}: {self.before:.3f} {self.unit} stored, {self.now:.3f} now ({self.now / self.before - 1:+.1%})"
        )


def read_stored(path: Path, schema: int | str) -> dict[str, Any]:
    """Return the content of a stored report. Raises ValueError for a file that is not a report of
    `schema`.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    stored = json.loads(read_bounded(path, MAX_BYTES))
    if not isinstance(stored, dict) or stored.get("schema") != schema:
        raise ValueError(f"{path} is not a report of this benchmark (schema {schema})")
    return stored


def stored_ratios(path: Path) -> dict[str, float]:
    """Time divided by floor for each row of a stored report's own backend.

    Raises ValueError for a file that is not a report of this benchmark.
    """
    stored = read_stored(path, SCHEMA)
    return {line["row"]: line["over_floor"] for line in stored["rows"] if line["by"] == stored["backend"]}


def regressions(report: Report, stored: dict[str, float], threshold: float) -> list[Regression]:
    """Return the rows whose ratio grew by more than the fraction `threshold`; only rows in both are
    compared.
    """
    rate = report.copy.rate
    own = {m.row.name: m.over_floor(rate) for m in report.measurements if m.by == report.backend}
    pairs = [Regression(row, stored[row], now) for row, now in own.items() if row in stored]
    return grown(pairs, threshold)


def grown(pairs: Iterable[Regression], threshold: float) -> list[Regression]:
    """Return the pairs that grew by more than the fraction `threshold`."""
    return [pair for pair in pairs if pair.now > pair.before * (1 + threshold)]


def today() -> str:
    """Return the date of a report, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()
