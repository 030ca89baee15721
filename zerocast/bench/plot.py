"""A report as a picture: how far each row is from its floor, and how many bytes a second that makes."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zerocast.bench.measurement import Measurement
from zerocast.bench.report import Report

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
LONGEST = 4.0  # times the floor; longer bars are cut and say their length


def plot(report: Report, path: Path) -> None:
    """Write a PNG: a bar a measurement, rows from the top down, ours and the peers in colours of their own."""
    rows = list(dict.fromkeys(m.row.name for m in report.measurements))
    figure = Figure(figsize=(14, 1.5 + 0.3 * len(report.measurements)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    by = dict.fromkeys([report.backend, *(m.by for m in report.measurements)])
    height = 0.8 / max(1, len(by))
    for lane, (name, color) in enumerate(zip(by, COLORS, strict=False)):
        own = [m for m in report.measurements if m.by == name]
        places = [rows.index(m.row.name) + lane * height for m in own]
        _floors(left, report, own, places, height, color, name)
        right.barh(places, [m.rate for m in own], height, color=color)
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set(
        xlabel="time / floor (| is the target)",
        xlim=(0, LONGEST * 1.15),
        title=f"{report.machine['device']}, {report.date}",
    )
    left.set_yticks([place + 0.4 - height / 2 for place in range(len(rows))], rows, fontsize=8)
    left.invert_yaxis()
    left.margins(y=0.01)
    left.legend(fontsize=8)
    right.axvline(report.copy.rate, color="black", linewidth=0.8)
    right.set(xlabel="GB/s of the bytes that must move; the line is a copy")
    figure.savefig(path, dpi=120)


def _floors(
    axes: Axes, report: Report, own: list[Measurement], places: list[float], height: float, color: str, name: str
) -> None:
    ratios = [m.over_floor(report.copy.rate) for m in own]
    bars = axes.barh(places, [min(ratio, LONGEST) for ratio in ratios], height, color=color, label=name)
    axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=2, fontsize=7)
    for m, place in zip(own, places, strict=True):
        if report.full and name == report.backend and m.row.target and m.row.target.row is None:
            limit = m.row.target.limit
            axes.plot([limit, limit], [place - height / 2, place + height / 2], color="black", linewidth=1.5)
