"""Footprints side by side as stacked bars: memory on the left, traffic on the right."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zerocast.footprint.footprint import Footprint

GIB, GB = 2**30, 10**9
COLORS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#f0e442", "#d55e00", "#cc79a7")


def plot(footprints: Sequence[Footprint], title: str, path: Path) -> None:
    """Write a PNG."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _stack(left, [(f.format, f.memory) for f in footprints], GIB)
    left.set_ylabel("GiB a rank, without activations")
    _stack(right, [(f.format, f.wire) for f in footprints], GB)
    right.set_ylabel("GB that a rank sends in a step")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def _stack(axes: Axes, bars: Sequence[tuple[str, dict[str, int]]], unit: int) -> None:
    names = [name for name, _ in bars]
    below = [0.0] * len(bars)
    for term, color in zip(bars[0][1], COLORS, strict=False):
        heights = [terms[term] / unit for _, terms in bars]
        axes.bar(names, heights, bottom=below, color=color, label=term, width=0.6)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    for place, total in enumerate(below):
        axes.annotate(f"{total:.1f}", (place, total), ha="center", va="bottom", fontsize=8)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    axes.margins(y=0.08)
