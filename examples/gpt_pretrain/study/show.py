"""The outcome of a study as a table in Markdown and as a picture."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.gpt_pretrain.report import COLORS as FEW_COLORS
from examples.gpt_pretrain.report import STYLES, smooth
from examples.gpt_pretrain.study.outcome import Outcome
from examples.gpt_pretrain.study.plan import BASELINE, SEEDS

# nats per byte: gaps below are drawn on a linear scale, larger ones on a logarithmic one
LINEAR = 0.02
COLORS = (*FEW_COLORS, "#56b4e9", "#8c564b", "#7f7f00", "#17becf", "#9467bd", "#d62728", "#000000", "#ff9896")


def table(outcome: Outcome) -> str:
    """Return a table with a row for each variant: the rounded operands of products, gaps as mean ±
    standard deviation and as a part of the baseline's loss, then seed by seed, or the interval of
    the mean gap where there are more seeds than fit into a table.
    """
    seeds = list(outcome["variants"][BASELINE]["seeds"])
    are_few = len(seeds) <= len(SEEDS)
    gaps_of = [f"seed {seed}" for seed in seeds] if are_few else ["95 % interval", "compared with", "pairs"]
    gap = f"gap to {BASELINE}" if are_few else "gap"
    heads = ["weights", "products round", "validation loss", gap, "of its loss", *gaps_of, "skipped steps"]
    rows = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for name, found in outcome["variants"].items():
        loss = f"{found['validation_loss']:.4f} ± {found['validation_loss_deviation']:.4f}"
        skipped = sum(run["skipped_steps"] for run in found["seeds"].values())
        gaps = [""] * (2 + len(gaps_of))
        if name != BASELINE:
            gaps = [f"{found['gap']:+.4f} ± {found['gap_deviation']:.4f}", f"{100 * found['share']:+.2f} %"]
            gaps += _seed_by_seed(found, seeds) if are_few else _interval(found)
        paths = {path for run in found["seeds"].values() for path in run["products"]}
        rows.append([f"`{name}`".replace("|", "\\|"), _rounded(paths), loss, *gaps, str(skipped)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _seed_by_seed(found: Outcome, seeds: Sequence[str]) -> list[str]:
    """Return the gap of each seed."""
    gaps = dict(zip(found["seeds"], found["gaps"], strict=True))
    return [f"{gaps[seed]:+.4f}" if seed in gaps else "not run" for seed in seeds]


def _interval(found: Outcome) -> list[str]:
    """Return the interval of the mean gap, to which row it is the gap, and of how many pairs."""
    low, high = found["gap"] - found["gap_interval"], found["gap"] + found["gap_interval"]
    return [f"{low:+.4f} to {high:+.4f}", f"`{found['compared']}`", str(len(found["gaps"]))]


def _rounded(paths: set[str]) -> str:
    """Return the operands that products by these paths of `zerocast.gemm` round, besides rounding
    to the nominal dtype.
    """
    scaled = sorted(paths - {"dequantize"})
    return f"weights and inputs ({', '.join(scaled)})" if scaled else "weights" if paths else "nothing"


def markdown(outcome: Outcome, command: str) -> str:
    """Return the table with the machine that it was measured on and the command that makes it."""
    machine, config = outcome["machine"], outcome["config"]
    tokens = (
        config["steps"] * config["batch_size"] * config["grad_accum"] * config["model"]["context"] * outcome["ranks"]
    )
    facts = [
        f"`{command}`",
        f"{outcome['parameters']:,} parameters, {config['steps']} steps, {tokens:,} bytes of text a run "
        f"(fingerprint {outcome['text']}), {outcome['ranks']} ranks on {outcome['device']}",
        f"{' and '.join(outcome['machines'])}, {' and '.join(map(str, outcome['cores']))} cores, {machine['system']}, "
        f"Python {machine['python']}, torch {machine['torch']}, zerocast {machine['zerocast']}",
        f"first run {outcome['dates'][0]}, last {outcome['dates'][1]}",
    ]
    head = "\n".join(f"* {fact}" for fact in facts)
    note = (
        "Loss in nats per byte over validation text that is never trained on. A gap is a run's loss less that of the "
        f"`{BASELINE}` run of the same seed, or of the one that is named; ± is the sample standard deviation over the seeds, "
        "an interval that of the mean gap."
    )
    return (
        f"<!-- written by examples.gpt_pretrain.study -->\n\n{head}\n\n{table(outcome)}\n{note}\n\n![gaps](gap.png)\n"
    )


def plot(outcome: Outcome, path: Path) -> None:
    """Draw the final gap of every run, and the gap of the training loss over the steps."""
    figure = Figure(figsize=(13, 4.8), layout="constrained")
    final, course = figure.subplots(1, 2, width_ratios=(1, 1.3))
    _plot_final(final, outcome)
    _plot_course(course, outcome)
    figure.savefig(path, dpi=120)


def _plot_final(axes: Axes, outcome: Outcome) -> None:
    names = [name for name in outcome["variants"] if name != BASELINE]
    for row, (name, color) in enumerate(zip(names, COLORS[1 : len(names) + 1], strict=True)):
        found = outcome["variants"][name]
        axes.errorbar(found["gap"], row, xerr=found["gap_deviation"], fmt="s", color=color, capsize=4)
        axes.plot(found["gaps"], [row + 0.18] * len(found["gaps"]), "o", color=color, fillstyle="none")
    axes.set_yticks(range(len(names)), names)
    axes.set(
        xlabel="nats per byte",
        title=f"validation loss less that of {BASELINE}\nsquare: mean ± deviation; circles: seeds",
    )
    axes.axvline(0, color=COLORS[0], linewidth=0.8)
    axes.set_xscale("symlog", linthresh=LINEAR)
    axes.margins(x=0.1)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)


def _plot_course(axes: Axes, outcome: Outcome) -> None:
    """Draw the smoothed gap over the steps; all runs of a seed train on the same batches."""
    baseline = outcome["variants"][BASELINE]["seeds"]
    names = [name for name in outcome["variants"] if name != BASELINE]
    for name, color, style in zip(names, COLORS[1 : len(names) + 1], itertools.cycle(STYLES[1:]), strict=False):
        seeds = outcome["variants"][name]["seeds"]
        curves = [_gaps(run["train_curve"], baseline[seed]["train_curve"]) for seed, run in seeds.items()]
        steps = [step for step, _ in next(iter(seeds.values()))["train_curve"]]
        by_step = list(zip(*curves, strict=True))
        axes.plot(steps, [statistics.fmean(gaps) for gaps in by_step], style, color=color, label=name)
        axes.fill_between(steps, list(map(min, by_step)), list(map(max, by_step)), color=color, alpha=0.15, linewidth=0)
    axes.set(
        xlabel="step",
        ylabel="nats per byte",
        title=f"training loss less that of {BASELINE}, smoothed\nmean and range of the seeds",
    )
    axes.set_yscale("symlog", linthresh=LINEAR)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
    axes.grid(alpha=0.3)


def _gaps(run: Sequence[tuple[int, float]], baseline: Sequence[tuple[int, float]]) -> list[float]:
    return smooth([loss - base for (_, loss), (_, base) in zip(run, baseline, strict=True)], keep=0.95)
