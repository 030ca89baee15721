"""`zerocast inspect`: the contents of a checkpoint and the effect of a format on its weights."""

import json
import pickle
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from zerocast.cli import print_error
from zerocast.cli.options import InspectConfig
from zerocast.cli.output import check_folder, tracked, written
from zerocast.inspection import DTYPES, LOWEST, CastStatistics, Chosen, Contents, choose, measure, nbytes_of

# The most rows of the lower panel of the plot. It shows a sample if there are more weights.
ROWS = 200


def inspect(config: InspectConfig) -> int:
    """Run `zerocast inspect`; returns the exit status."""
    try:
        check_folder(config.png)
        contents = Contents.read(config.checkpoint)
    except FileNotFoundError as error:
        return _complain(error, 2)
    except (ValueError, ImportError, OSError, pickle.UnpicklingError) as error:
        return _complain(error, 2 if isinstance(error, ImportError) else 1)
    try:
        chosen = choose(contents.entries, contents.stored, config.format, config.weights, DTYPES[config.dtype])
    except (TypeError, ValueError) as error:
        return _complain(error, 2)
    try:
        statistics = [_measured(contents, chosen, name) for name in tracked(list(contents.entries))]
        if config.png and statistics:
            with written(config.png) as path:
                _plot(statistics, config.checkpoint, path)
    except (OSError, ValueError) as error:
        return _complain(error, 1)
    report = _as_dict(config, contents, chosen, statistics)
    print(json.dumps(report, indent=1) if config.json else _text(report))
    return 1 if any(weight.nonfinite for weight in statistics) else 0


def _complain(error: Exception, status: int) -> int:
    print_error(f"zerocast inspect: {error}")
    return status


def _measured(contents: Contents, chosen: Chosen, name: str) -> CastStatistics:
    fmt, dtype = chosen.formats.get(name, (None, torch.bfloat16))
    # If the weight had this format, the checkpoint has the scale of its last cast.
    is_stored_format = name in contents.stored and fmt is not None and str(fmt) == contents.stored[name].format
    cast_scale = contents.cast_scale(name) if is_stored_format else None
    return measure(contents.source, contents.masters[name], fmt, dtype, cast_scale, name)


def _as_dict(
    config: InspectConfig, contents: Contents, chosen: Chosen, statistics: list[CastStatistics]
) -> dict[str, Any]:
    manifest = contents.manifest
    nbytes = sum(nbytes_of(contents.entries[weight.name]) for weight in statistics)
    masters = {"tensors": len(statistics), "bytes": nbytes}
    others = {kind: {"tensors": count, "bytes": nbytes} for kind, (count, nbytes) in contents.other.items()}
    no_masters = {
        name: str(contents.source.entries[key])
        for name, key in contents.masters.items()
        if name not in contents.entries
    }
    return {
        "checkpoint": str(contents.location),
        "checked_files": len(manifest.files) if manifest else 0,
        "torch": manifest.torch if manifest else None,
        "step": contents.step,
        "masters": masters,
        "other": others,
        "no_masters": no_masters,
        "kept": list(chosen.kept),
        "first_binade": LOWEST,
        "weights": [asdict(weight) for weight in statistics],
    }


def _text(report: dict[str, Any]) -> str:
    checked = (
        f"{report['checked_files']} files as their hashes say" if report["checked_files"] else "no hashes to check"
    )
    lines = [f"{report['checkpoint']}: {checked}"]
    if report["step"] is not None:
        lines.append(f"after {report['step']:,} steps")
    for kind, size in {"masters": report["masters"], **report["other"]}.items():
        lines.append(f"  {kind:<12}{size['tensors']:>8,} tensors {size['bytes'] / 2**20:>12,.1f} MiB")
    lines += [f"  {name} is {entry}: not high precision" for name, entry in report["no_masters"].items()]
    lines += [f"  {name} is not cast: the format does not support its shape" for name in report["kept"]]
    width = max([4, *(len(weight["name"]) for weight in report["weights"])])
    head = f"{'name':<{width}}  {'shape':<16}{'format':<16}{'amax':>11}{'zero':>10}{'saturated':>11}{'flushed':>10}{'error':>10}"
    return "\n".join([*lines, "", head, *(_row(weight, width) for weight in report["weights"])])


def _row(weight: dict[str, Any], width: int) -> str:
    shape = "x".join(map(str, weight["shape"]))
    text = (
        f"{weight['name']:<{width}}  {shape:<16}{weight['format']:<16}{weight['amax']:>11.4g}{weight['zeros']:>10.3%}"
    )
    if weight["saturated"] is not None:
        error = "-" if weight["error"] is None else f"{weight['error']:.3%}"
        text += f"{weight['saturated']:>11.3%}{weight['flushed']:>10.3%}{error:>10}"
    return text + (f"  {weight['nonfinite']:,} not finite" if weight["nonfinite"] else "")


def _plot(statistics: Sequence[CastStatistics], title: str, path: Path) -> None:
    """Write a PNG with a histogram of all weights above and one row for each weight below.

    It shows the weights that are cast, or all tensors if none is. `statistics` is not empty.
    """
    weights = [weight for weight in statistics if weight.casts] or statistics
    masters = np.array([weight.masters for weight in weights], dtype=np.float64)
    casts = np.array([weight.casts or weight.masters for weight in weights], dtype=np.float64)
    used = np.flatnonzero(masters.sum(0) + casts.sum(0))
    first, last = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 1)
    powers = np.arange(first, last) + LOWEST
    drawn = list(range(0, len(weights), -(-len(weights) // ROWS)))
    figure = Figure(figsize=(10, 3.5 + 0.16 * len(drawn)), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3.0, 0.5 + 0.16 * len(drawn)])
    for counts, label, color in ((masters, "masters", "#0072b2"), (casts, "cast", "#d55e00")):
        total = counts.sum(0)[first:last]
        above.step(powers, total / max(1.0, masters.sum()), where="mid", label=label, color=color)
    above.set_yscale("log")
    above.set_ylabel("share of nonzero elements")
    above.legend()
    row_maxima = np.maximum(masters[drawn].max(1, keepdims=True), 1.0)
    shares = masters[drawn, first:last] / row_maxima
    below.imshow(
        shares, aspect="auto", extent=(powers[0] - 0.5, powers[-1] + 0.5, len(drawn) - 0.5, -0.5), cmap="Blues"
    )
    below.set_yticks(range(len(drawn)), [weights[i].name for i in drawn], fontsize=6)
    below.set_xlabel("floor(log2 |x|)")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
