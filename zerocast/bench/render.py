"""Reports for people: a Markdown page with a table, of casts and of training steps."""

from collections.abc import Iterator, Mapping, Sequence

from zerocast.bench.report import Failure, Measurement, Report
from zerocast.bench.row import Row
from zerocast.bench.step_report import GIB, LAST_LOSSES, StepMeasurement, StepReport
from zerocast.bench.variant import code_of

HEADS = (
    "row", "by", "ms", "MB", "GB/s", "of copy", "floor ms", "x floor", "launches", "host ms", "wall ms", "x ours"
)  # fmt: skip
LEFT = {"row", "by"}


def markdown(report: Report) -> str:
    """Return the whole report as Markdown, ready for a README."""
    return "\n".join([*_head(report), "", *_table(report), *_failures(report.failures)]) + "\n"


def _head(report: Report) -> Iterator[str]:
    copy, machine = report.copy, report.machine
    yield f"## {report.date}: {machine['device']}"
    yield ""
    yield f"Backend `{report.backend}`. {_versions(machine)}."
    yield ""
    yield (
        f"Copy of {copy.nbytes / 1e6:,.0f} MB in this run: {copy.before:,.0f} GB/s before the rows, {copy.after:,.0f} GB/s after, "
        f"bytes read plus written; floors are taken at the mean, {copy.rate:,.0f} GB/s."
    )
    yield ""
    yield report.method


def _versions(machine: Mapping[str, str | int | None]) -> str:
    return ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None and name != "device")


def legend(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the names of rows explained, for a terminal."""
    workloads = {row.workload.name: row.workload.summary for row in rows}
    works = {row.work.name: row.work.summary for row in rows}
    yield "A row is a workload, a piece of work and a format."
    for name, summary in (workloads | works).items():
        yield f"  {name:<20}{summary}"
    yield "  x floor             time over the time of a copy of the same bytes; 1 is memory speed"


def _table(report: Report) -> Iterator[str]:
    yield _line(HEADS)
    yield _line(["---" if head in LEFT else "---:" for head in HEADS])
    for measurement in report.measurements:
        yield _line(_cells(report, measurement))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(report: Report, m: Measurement) -> list[str]:
    rate, ratio = report.copy.rate, report.over_ours(m)
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
    ]


def _failures(failures: Sequence[Failure]) -> Iterator[str]:
    if failures:
        yield ""
        yield "Not measured:"
    for failure in failures:
        yield f"* {failure.row.name} by {failure.by}: {failure.reason}"


STEP_HEADS = (
    "row", "ms", "tokens/s", "x bf16", "x FSDP2's bf16", "free-running ms", "x bf16", "x FSDP2's bf16", "host ms",
    "x bf16", "cpu ms", "free host ms", "waits", "peak GiB", "kept GiB", "wire MB", "loss",
)  # fmt: skip
STEP_METHOD = (
    "ms: median of steps that start together on idle devices, until all work is done, from which tokens/s follow; "
    "free-running: mean of steps between which nothing waits; x bf16: over the same time of the same host with bf16; "
    "host: until the calls of a step return; cpu: processor time of all threads until then; waits: times that the host waits "
    "for the device in a step; peak: the most that was allocated; kept: what a forward pass leaves allocated; wire: full-size "
    "side of the collectives of a step. The slowest or fullest rank counts. "
)


def step_markdown(report: StepReport) -> str:
    """Return the whole report of training steps as Markdown."""
    failures = [f"* {failure.row}: {failure.reason}" for failure in report.failures]
    return "\n".join(
        [
            f"## {report.date}: {report.ranks} x {report.machine['device']}",
            "",
            f"{_versions(report.machine)}.",
            "",
            ", ".join(f"{name} {value}" for name, value in report.settings.items()) + f"; {report.tokens:,} tokens a step.",
            "",
            STEP_METHOD + _losses(report),
            "",
            _line(STEP_HEADS),
            _line(["---", *["---:"] * (len(STEP_HEADS) - 1)]),
            *(_line(_step_cells(report, m)) for m in report.measurements),
            *_code(report),
            *(["", "Not measured:", *failures] if failures else []),
        ]
    ) + "\n"  # fmt: skip


def _losses(report: StepReport) -> str:
    tokens = "the text" if "text" in report.settings else "random tokens"
    return f"Loss: mean of the last {LAST_LOSSES} steps, or fewer, on {tokens} before the timed ones."


def _step_cells(report: StepReport, m: StepMeasurement) -> list[str]:
    ratios = report.over_bf16(m), report.over_bf16(m, "fsdp2")
    host_ratio = report.host_over_bf16(m)
    synchronized, free = ([f"{pair[clock]:.3f}" if pair else "" for pair in ratios] for clock in (0, 1))
    sizes = ["" if size is None else f"{size / GIB:.2f}" for size in (m.peak_bytes, m.kept_bytes)]
    return [
        m.row,
        f"{m.ms:.1f}",
        f"{report.tokens_per_second(m):,.0f}",
        *synchronized,
        f"{m.free_ms:.1f}",
        *free,
        f"{m.host_ms:.1f}",
        "" if host_ratio is None else f"{host_ratio:.3f}",
        f"{m.cpu_ms:.1f}",
        f"{m.free_host_ms:.1f}",
        f"{m.profile.waits:g}" if m.profile else "",
        *sizes,
        f"{sum(m.wire_bytes.values()) / 1e6:,.0f}",
        f"{m.loss:.4f}",
    ]


def _code(report: StepReport) -> Iterator[str]:
    """Yield the lines of code that give rows: the fast recipe's, and the plain default's."""
    lines = [f"* {m.row}: `{code}`" for m in report.measurements if (code := code_of(m.row))]
    if lines:
        yield from ("", "By one line of code, in addition to the optimizer's:", *lines)
