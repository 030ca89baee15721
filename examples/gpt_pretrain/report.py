"""The results of the demo, as a table, as a picture and as JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from examples.gpt_pretrain.run_log import Record

BASELINE = "bf16"
COLORS = ("#555555", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
# The recorded results of three seeds of each format (`study/README.md`).
STUDY = Path(__file__).with_name("study") / "cpu/results.json"
STYLES = ("-", "--", ":", "-.", "--", ":")
Results = dict[str, Any]


def collect(records: Mapping[str, Sequence[Record]], seconds: Mapping[str, float]) -> Results:
    """Join the logs of all runs; `seconds` is the wall time of each, start included. Gaps are in
    nats.
    """
    runs = {name: _run(records[name], seconds[name]) for name in records}
    for run in runs.values():
        for side in ("train", "validation"):
            base = runs[BASELINE][f"{side}_loss"] if BASELINE in runs else None
            run[f"{side}_gap_to_{BASELINE}"] = None if base is None else run[f"{side}_loss"] - base
    start = next(iter(records.values()))[0]
    settings = {key: start[key] for key in ("ranks", "device", "parameters", "text", "config")}
    return {"seconds": sum(seconds.values()), "machine": start["machine"], "settings": settings, "runs": runs}


def _run(records: Sequence[Record], seconds: float) -> Record:
    end = records[-1]
    return {
        "train_loss": end["train_loss"],
        "validation_loss": end["validation_loss"],
        "weight_bytes_per_parameter": end["weight_bytes_per_parameter"],
        "all_gather_bytes_per_parameter": end["traffic_bytes_per_parameter"].get("weight_gather", 0.0),
        "traffic_bytes_per_parameter": end["traffic_bytes_per_parameter"],
        "tokens_per_s": end["tokens_per_s"],
        "skipped_steps": end["skipped_steps"],
        "seconds": seconds,
        "train_curve": curve(records, "train"),
        "validation_curve": curve(records, "validation"),
    }


def curve(records: Sequence[Record], event: str) -> list[tuple[int, float]]:
    """Return (step, loss) of every record of one kind."""
    return [(record["step"], record["loss"]) for record in records if record["event"] == event]


def table(results: Results) -> Table:
    """Lay the results out for 80 columns, one row per format."""
    title = "{parameters:,} parameters, {ranks} ranks on {device}".format(**results["settings"])
    out = Table(
        title=f"{title}, {results['seconds']:.0f} s in all", caption=_CAPTION, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    out.add_column("weights", no_wrap=True)
    losses = ("train\nloss", "val.\nloss", f"gap to\n{BASELINE}")
    for header in ("gathered\nB/param", "resident\nB/param", "forward\nB/param", *losses, "tokens/s"):
        out.add_column(header, justify="right", no_wrap=True)
    for name, run in results["runs"].items():
        gap, weights = run[f"validation_gap_to_{BASELINE}"], run["weight_bytes_per_parameter"]
        gathered = run["all_gather_bytes_per_parameter"]
        out.add_row(
            name,
            *(f"{nbytes:.3f}" for nbytes in (gathered, weights["resident"], weights["forward"])),
            f"{run['train_loss']:.4f}",
            f"{run['validation_loss']:.4f}",
            "" if gap is None else f"{gap:+.4f}",
            f"{run['tokens_per_s']:,.0f}",
        )
    return out


_CAPTION = """\
Bytes are measured, over all parameters. gathered: a step. resident:
with copies for the backward pass. forward: read by a forward pass.
Loss in nats per byte; the gap is between validation losses."""


def plot(results: Results, path: Path) -> None:
    """Draw the bytes, the losses, and their differences from the baseline."""
    runs = results["runs"]
    panels = [_plot_bytes, _plot_losses, *([_plot_gaps] if BASELINE in runs and len(runs) > 1 else [])]
    figure = Figure(figsize=(5 * len(panels), 4.5), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        panel(axes, runs)
    figure.savefig(path, dpi=150)


def _plot_losses(axes: Axes, runs: Mapping[str, Record]) -> None:
    for (name, run), color, style in zip(runs.items(), COLORS, STYLES, strict=False):
        steps, losses = zip(*run["train_curve"], strict=True)
        axes.plot(steps, losses, color=color, alpha=0.15, linewidth=0.8)
        axes.plot(steps, smooth(losses), style, color=color, label=name)
        axes.plot(*zip(*run["validation_curve"], strict=True), "o", color=color, fillstyle="none")
    axes.set(xlabel="step", ylabel="nats per byte", title="training loss, smoothed; circles: validation")
    axes.legend()
    axes.grid(alpha=0.3)


def _plot_gaps(axes: Axes, runs: Mapping[str, Record]) -> None:
    """Draw the difference from the baseline; all runs train on the same batches at each step."""
    baseline = [loss for _, loss in runs[BASELINE]["train_curve"]]
    study = json.loads(STUDY.read_text())
    for (name, run), color, style in zip(runs.items(), COLORS, STYLES, strict=False):
        steps, losses = zip(*run["train_curve"], strict=True)
        gaps = [loss - base for loss, base in zip(losses, baseline, strict=True)]
        axes.plot(steps, smooth(gaps), style, color=color, label=name)
        axes.plot(steps[-1], run[f"validation_gap_to_{BASELINE}"], "o", color=color, fillstyle="none")
        if name in study["variants"] and name != BASELINE:
            gap, deviation = (study["variants"][name][key] for key in ("gap", "gap_deviation"))
            axes.axhspan(gap - deviation, gap + deviation, color=color, alpha=0.1)
    title = f"loss minus the loss of {BASELINE}; circles: validation\nbands: three seeds, {study['dates'][0][:10]}"
    axes.set(xlabel="step", ylabel="nats per byte", title=title)
    axes.grid(alpha=0.3)


def _plot_bytes(axes: Axes, runs: Mapping[str, Record]) -> None:
    kinds = {
        "all-gather a step": [run["all_gather_bytes_per_parameter"] for run in runs.values()],
        "weights, resident": [run["weight_bytes_per_parameter"]["resident"] for run in runs.values()],
        "weights, forward": [run["weight_bytes_per_parameter"]["forward"] for run in runs.values()],
    }
    height = 0.8 / len(runs)
    for i, (name, color) in enumerate(zip(runs, COLORS, strict=False)):
        values = [kind[i] for kind in kinds.values()]
        bars = axes.barh([row + i * height for row in range(len(kinds))], values, height, color=color, label=name)
        axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(kinds))], list(kinds))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel="bytes per parameter", title="measured on buffers and collectives")


def smooth(values: Sequence[float], keep: float = 0.9) -> list[float]:
    """Average exponentially over about ten values, corrected for the start."""
    average, weight, out = 0.0, 0.0, []
    for value in values:
        average, weight = keep * average + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(average / weight)
    return out


def write_json(results: Results, path: Path) -> None:
    """Write all numbers of the table and the picture."""
    path.write_text(json.dumps(results, indent=1) + "\n")
