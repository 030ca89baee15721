"""Reports of measurements: floors, peers, regressions, JSON and Markdown."""

import json
from pathlib import Path

import pytest

from zerocast.bench.clock import Times
from zerocast.bench.render import markdown
from zerocast.bench.report import CopyRate, Failure, Measurement, Report, regressions, stored_ratios
from zerocast.bench.row import ADAM, CAST, Row
from zerocast.bench.workload import Workload

# Reports of made-up times. Nothing here was measured.
TINY = Workload("T", ((32, 32),), 1)
ROW = Row(TINY, CAST, "fp8_current")
ADAM_ROW = Row(TINY, ADAM, "")
COPY = CopyRate(1 << 20, before=1.0, after=3.0)  # 2 GB/s


def measured(row: Row, by: str, ms: float, host_ms: float = 0.0) -> Measurement:
    return Measurement(row, by, Times(11, ms, ms, ms, host_ms, 2 * ms), 3, None)


def report(*measurements: Measurement, failures: tuple[Failure, ...] = ()) -> Report:
    machine = {"device": "None At All", "torch": "0"}
    return Report("2000-01-01", "ours", machine, {"scale": 1}, "Made up.", COPY, measurements, failures)


ADAM_FLOOR = 28 * 1024 / 2e6  # ms at 2 GB/s


def at(ratio: float, by: str = "ours") -> Measurement:
    """Return a measurement of Adam on 1,024 elements in `ratio` times its floor."""
    return measured(ADAM_ROW, by, ratio * ADAM_FLOOR)


def test_a_floor_is_bytes_over_the_mean_copy_rate():
    assert COPY.rate == 2.0
    m = at(1.25)
    assert m.moved == 28 * 1024
    assert m.floor_ms(COPY.rate) == pytest.approx(0.014336)
    assert m.over_floor(COPY.rate) == pytest.approx(1.25)
    assert m.rate == pytest.approx(2 / 1.25)
    assert measured(Row(TINY, ADAM, "", clock="wall"), "ours", 1.0).ms == 2.0


def test_peers_stand_beside_ours():
    ours, theirs = at(1.0), at(3.5, "theirs")
    both = report(ours, theirs)
    assert both.over_ours(theirs) == pytest.approx(3.5)
    assert both.over_ours(ours) is None
    assert report(theirs).over_ours(theirs) is None


def stored(tmp_path: Path, found: Report) -> Path:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(found.as_dict()))
    return path


@pytest.mark.parametrize(("now", "grown"), [(1.0, 0), (1.049, 0), (1.051, 1), (0.5, 0)])
def test_growth_beyond_the_threshold_is_a_regression(tmp_path: Path, now: float, grown: int):
    before = stored_ratios(stored(tmp_path, report(at(1.0), at(9.0, "theirs"))))
    assert before == {"T Adam": pytest.approx(1.0)}
    found = regressions(report(at(now), at(99.0, "theirs")), before, threshold=0.05)
    assert len(found) == grown
    assert regressions(report(at(5.0)), {"a row of another report": 1.0}, threshold=0.05) == []
    assert all(str(regression).startswith("T Adam: 1.000 x floor stored, 1.051 now (+5.1%)") for regression in found)


def test_a_file_of_another_kind_is_refused(tmp_path: Path):
    path = tmp_path / "other.json"
    for content in ("[]", "{}", '{"schema": 99}'):
        path.write_text(content)
        with pytest.raises(ValueError, match="not a report"):
            stored_ratios(path)


def test_markdown_has_a_line_a_measurement_and_names_failures():
    row = Row(TINY, ADAM, "")
    slow = measured(row, "ours", 1.2 * ADAM_FLOOR)
    incomplete = report(slow, failures=(Failure(ROW, "theirs", "does not run", ours=False),))
    assert not incomplete.failed  # a peer's failure is only a fact
    text = markdown(incomplete)
    (line,) = [line for line in text.splitlines() if line.startswith("| T Adam")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        "T Adam", "ours", "0.017", "0.0", "2", "83%", "0.014", "1.20", "3", "0.000", "0.034", ""
    ]  # fmt: skip
    assert "\nNot measured:\n* T cast fp8_current by theirs: does not run" in text
    assert "Not measured" not in markdown(report(slow))
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
