"""Report: all measurements of one run as JSON, and their comparison with a stored report."""

import datetime
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zerocast.bench.measurement import Failure, Measurement, Verdict, judge
from zerocast.checkpoint.regular_file import read_bounded

SCHEMA = 1


@dataclass(frozen=True)
class CopyRate:
    """GB/s of a copy of `nbytes` on the device, before and after the rows; reads plus writes."""

    nbytes: int
    before: float
    after: float

    @property
    def rate(self) -> float:
        """The mean of the two, by which the floors of the rows are computed."""
        return (self.before + self.after) / 2


@dataclass(frozen=True)
class Report:
    """All results of one run; `backend` is the one of ours that was measured.

    `full` is True if targets apply, which are set for full-size workloads on a GPU.
    """

    date: str
    backend: str
    full: bool
    machine: Mapping[str, str | int | None]
    settings: Mapping[str, Any]
    method: str
    copy: CopyRate
    measurements: tuple[Measurement, ...]
    failures: tuple[Failure, ...] = ()

    @cached_property
    def _ours(self) -> dict[str, Measurement]:
        return {m.row.name: m for m in self.measurements if m.by == self.backend}

    def verdict(self, measurement: Measurement) -> Verdict | None:
        """The verdict on one of our measurements; None if no target applies to it."""
        target = measurement.row.target
        if target is None or not self.full or measurement.by != self.backend:
            return None
        other = self._ours.get(target.row or "")
        return judge(measurement, target, self.copy.rate, other.ms if other else None)

    def over_ours(self, measurement: Measurement) -> float | None:
        """A peer's time divided by ours for the same row; None for our own measurements."""
        ours = self._ours.get(measurement.row.name)
        return None if measurement.by == self.backend or ours is None else measurement.ms / ours.ms

    @property
    def failed(self) -> bool:
        """True if a row of ours could not be measured or wrote wrong bytes."""
        return any(failure.ours for failure in self.failures)

    def as_dict(self) -> dict[str, Any]:
        """All numbers, measured and derived, as JSON types; README.md lists the keys."""
        return {
            "schema": SCHEMA,
            "date": self.date,
            "backend": self.backend,
            "full": self.full,
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
        verdict = self.verdict(m)
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
            "target": asdict(verdict) if verdict else None,
            "checked": m.checked,
        }

    def write_json(self, path: Path) -> None:
        """Write the result of `as_dict` to a file."""
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")


MOST_BYTES = 2**26


@dataclass(frozen=True)
class Regression:
    """A quantity of a row in the stored report and now; `unit` follows it in the text."""

    row: str
    before: float
    now: float
    unit: str = "x floor"

    def __str__(self) -> str:
        return (
            f"{self.row}: {self.before:.3f} {self.unit} stored, {self.now:.3f} now ({self.now / self.before - 1:+.1%})"
        )


def read_stored(path: Path, schema: int | str) -> dict[str, Any]:
    """The content of a stored report; ValueError for a file that is no report of `schema`."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there")
    stored = json.loads(read_bounded(path, MOST_BYTES))
    if not isinstance(stored, dict) or stored.get("schema") != schema:
        raise ValueError(f"{path} is not a report of this benchmark (schema {schema})")
    return stored


def stored_ratios(path: Path) -> dict[str, float]:
    """Time divided by floor for each row of a stored report's own backend.

    Raises ValueError for a file that is no report of this benchmark.
    """
    stored = read_stored(path, SCHEMA)
    return {line["row"]: line["over_floor"] for line in stored["rows"] if line["by"] == stored["backend"]}


def regressions(report: Report, stored: dict[str, float], threshold: float) -> list[Regression]:
    """The rows whose ratio grew by more than the fraction `threshold`; only rows in both are
    compared.
    """
    rate = report.copy.rate
    own = {m.row.name: m.over_floor(rate) for m in report.measurements if m.by == report.backend}
    pairs = [Regression(row, stored[row], now) for row, now in own.items() if row in stored]
    return grown(pairs, threshold)


def grown(pairs: Iterable[Regression], threshold: float) -> list[Regression]:
    """The pairs that grew by more than the fraction `threshold`."""
    return [pair for pair in pairs if pair.now > pair.before * (1 + threshold)]


def today() -> str:
    """The date of a report, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()
