"""Masters by power of two as a picture: all weights together beside their cast, and each weight as a row of colours."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from zerocast.inspection.cast_statistics import LOWEST, CastStatistics

ROWS = 200  # of the lower panel; more weights are drawn one in so many


def plot(found: Sequence[CastStatistics], title: str, path: Path) -> None:
    """Write a PNG of the weights that are cast, or of all tensors where none is; at least one."""
    found = [one for one in found if one.casts] or found
    masters = np.array([one.masters for one in found], dtype=np.float64)
    casts = np.array([one.casts or one.masters for one in found], dtype=np.float64)
    used = np.flatnonzero(masters.sum(0) + casts.sum(0))
    first, last = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 1)
    powers = np.arange(first, last) + LOWEST
    drawn = list(range(0, len(found), -(-len(found) // ROWS)))
    figure = Figure(figsize=(10, 3.5 + 0.16 * len(drawn)), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3.0, 0.5 + 0.16 * len(drawn)])
    for counts, label, color in ((masters, "masters", "#0072b2"), (casts, "cast", "#d55e00")):
        total = counts.sum(0)[first:last]
        above.step(powers, total / max(1.0, masters.sum()), where="mid", label=label, color=color)
    above.set_yscale("log")
    above.set_ylabel("share of nonzero elements")
    above.legend()
    shares = masters[drawn, first:last] / np.maximum(
        masters[drawn].max(1, keepdims=True), 1.0
    )  # each row by its fullest
    below.imshow(
        shares, aspect="auto", extent=(powers[0] - 0.5, powers[-1] + 0.5, len(drawn) - 0.5, -0.5), cmap="Blues"
    )
    below.set_yticks(range(len(drawn)), [found[i].name for i in drawn], fontsize=6)
    below.set_xlabel("floor(log2 |x|)")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
