"""A report as Markdown: where it was measured and how, then one table."""

from collections.abc import Iterator, Sequence

from zerocast.bench.measurement import Failure, Measurement
from zerocast.bench.report import Report

HEADS = (
    "row", "by", "ms", "MB", "GB/s", "of copy", "floor ms", "x floor", "launches", "host ms", "wall ms", "x ours", "target", "met"
)  # fmt: skip
LEFT = {"row", "by", "target"}


def markdown(report: Report) -> str:
    """The whole report, ready for a README."""
    return "\n".join([*_head(report), "", *_table(report), *_score(report), *_failures(report.failures)]) + "\n"


def _head(report: Report) -> Iterator[str]:
    copy, machine = report.copy, report.machine
    versions = ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None and name != "device")
    yield f"## {report.date}: {machine['device']}"
    yield ""
    yield f"Backend `{report.backend}`. {versions}."
    yield ""
    yield (
        f"Copy of {copy.nbytes / 1e6:,.0f} MB in this run: {copy.before:,.0f} GB/s before the rows, {copy.after:,.0f} GB/s after, "
        f"bytes read plus written; floors are taken at the mean, {copy.rate:,.0f} GB/s."
    )
    yield ""
    yield report.method


def _table(report: Report) -> Iterator[str]:
    yield _line(HEADS)
    yield _line(["---" if head in LEFT else "---:" for head in HEADS])
    for measurement in report.measurements:
        yield _line(_cells(report, measurement))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(report: Report, m: Measurement) -> list[str]:
    rate, ratio, verdict = report.copy.rate, report.over_ours(m), report.verdict(m)
    return [
        m.row.name,
        m.by,
        f"{m.ms:.3f}",
        f"{m.moved / 1e6:,.1f}",
        f"{m.rate:,.0f}",
        f"{m.rate / rate:.0%}",
        f"{m.floor_ms(rate):.3f}",
        f"{m.over_floor(rate):,.2f}",
        "" if m.launches is None else str(m.launches),
        f"{m.times.host_ms:.3f}",
        f"{m.times.wall_ms:.3f}",
        "" if ratio is None else f"{ratio:.2f}",
        verdict.text if verdict else "",
        "" if verdict is None else "yes" if verdict.met else f"no: {verdict.reached:.2f}",
    ]


def _score(report: Report) -> Iterator[str]:
    verdicts = [verdict for verdict in map(report.verdict, report.measurements) if verdict]
    if verdicts:
        yield ""
        yield f"Targets met: {sum(verdict.met for verdict in verdicts)} of {len(verdicts)}."


def _failures(failures: Sequence[Failure]) -> Iterator[str]:
    if failures:
        yield ""
        yield "Not measured:"
    for failure in failures:
        yield f"* {failure.row.name} by {failure.by}: {failure.reason}"
