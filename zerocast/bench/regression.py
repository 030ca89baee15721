"""Regressions: rows of ours that are further from their floor than in a stored report."""

import json
from dataclasses import dataclass
from pathlib import Path

from zerocast.bench.report import SCHEMA, Report
from zerocast.checkpoint.regular_file import read_bounded

MOST_BYTES = 2**26


@dataclass(frozen=True)
class Regression:
    """Time over floor of a row, stored and now."""

    row: str
    before: float
    now: float

    def __str__(self) -> str:
        return f"{self.row}: {self.before:.3f} x floor stored, {self.now:.3f} now ({self.now / self.before - 1:+.1%})"


def stored_ratios(path: Path) -> dict[str, float]:
    """Time over floor by row, of the backend that the stored report was about. ValueError for a file of another kind."""
    stored = json.loads(read_bounded(path, MOST_BYTES))
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not a report of this benchmark (schema {SCHEMA})")
    return {line["row"]: line["over_floor"] for line in stored["rows"] if line["by"] == stored["backend"]}


def regressions(report: Report, stored: dict[str, float], threshold: float) -> list[Regression]:
    """The rows whose ratio grew by more than `threshold` of itself. Rows that only one of the two has are not compared."""
    rate = report.copy.rate
    own = {m.row.name: m.over_floor(rate) for m in report.measurements if m.by == report.backend}
    pairs = [Regression(row, stored[row], now) for row, now in own.items() if row in stored]
    return [pair for pair in pairs if pair.now > pair.before * (1 + threshold)]
