"""`zerocast plan`: the bytes of a model in memory and on the wire, without a machine to run it."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zerocast.cli import interrupts
from zerocast.cli.options import PlanConfig
from zerocast.cli.output import check_folder, tracked, written
from zerocast.cli.sweep import Sweep
from zerocast.footprint.footprint import Footprint, Setup, footprint
from zerocast.footprint.shapes import LEFT_OUT, Parameter, read_model
from zerocast.optim import ZeroConfig

GIB = 2**30
GB = 10**9
COLORS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#f0e442", "#d55e00", "#cc79a7")
# The formats that every plan is compared with.
COMPARED = ("fp8_block", "bf16")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def plan(config: PlanConfig) -> int:
    """Run `zerocast plan`; returns the exit status."""
    try:
        check_folder(config.png)
        parameters = read_model(config.model)
        text = _sweep_text(config, parameters) if config.sweep else _plan_text(config, parameters)
    except (OSError, TypeError, ValueError) as error:
        interrupts.complain(f"zerocast plan: {error}")
        return 2
    print(text)
    return 0


def _plan_text(config: PlanConfig, parameters: Sequence[Parameter]) -> str:
    """The output for one setup. Also writes the PNG."""
    setup = _setup(config)
    formats = list(dict.fromkeys([config.format, *COMPARED]))
    footprints = [footprint(parameters, fmt, setup) for fmt in tracked(formats)]
    if config.png:
        with written(config.png) as path:
            _plot(footprints, _title(config, footprints[0]), path)
    return json.dumps(_as_dict(config, footprints), indent=2) if config.json else _text(config, footprints)


def _sweep_text(config: PlanConfig, parameters: Sequence[Parameter]) -> str:
    """The output of --sweep. Also writes the PNG."""
    for name in ("ranks", "parallel", "shard_ranks", "optimizer"):
        if getattr(config, name) != getattr(PlanConfig, name):
            raise ValueError(
                f"a sweep has its own ranks and shardings, with AdamW: leave out --{name.replace('_', '-')}"
            )
    sweep = Sweep.of(parameters, config.format, _setup(config))
    numel = sum(math.prod(parameter.shape) for parameter in parameters)
    title = f"{_name(config)}: {numel:,} parameters, {config.format}, a step with one micro-batch"
    if config.png:
        with written(config.png) as path:
            sweep.plot(title, path)
    if config.json:
        return json.dumps({"plan": _options(config), "sweep": sweep.as_dict()}, indent=2)
    return "\n".join([title, *_left_out(config), sweep.text()])


def _setup(config: PlanConfig) -> Setup:
    zero = ZeroConfig(
        bucket_size=ZeroConfig.bucket_size if config.bucket_size is None else config.bucket_size,
        grad_wire=config.grad_wire,
        grad_dtype=DTYPES[config.grad_dtype],
        moment_dtype="8bit" if config.moment_dtype == "8bit" else DTYPES[config.moment_dtype],
        keep_columnwise=config.keep_columnwise,
    )
    return Setup(config.parallel, config.ranks, config.shard_ranks, zero, config.optimizer)


def _options(config: PlanConfig) -> dict[str, Any]:
    options = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
    del options["named"]
    return options


def _as_dict(config: PlanConfig, footprints: Sequence[Footprint]) -> dict[str, Any]:
    entries = []
    for planned in footprints:
        totals = {"wire": planned.wire, "total_memory": planned.total_memory, "total_wire": planned.total_wire}
        entries.append({**asdict(planned), **totals})
    return {"plan": _options(config), "footprints": entries}


def _name(config: PlanConfig) -> str:
    path = Path(config.model)
    return path.resolve().name if path.is_dir() else path.stem


def _left_out(config: PlanConfig) -> list[str]:
    return [f"not counted: {LEFT_OUT[config.model]}"] if config.model in LEFT_OUT else []


def _title(config: PlanConfig, planned: Footprint) -> str:
    groups = f", shards of {config.shard_ranks}" if config.parallel == "hsdp" else ""
    optimizer = " with muon" if config.optimizer == "muon" else ""
    return (
        f"{_name(config)}: {planned.numel:,} parameters, {config.parallel}{optimizer} on {config.ranks:,} ranks{groups}"
    )


def _text(config: PlanConfig, footprints: Sequence[Footprint]) -> str:
    first = footprints[0]
    lines = [
        _title(config, first),
        *_left_out(config),
        f"{first.quantized:,} of them in {first.format}, the rest in bf16",
    ]
    if first.kept:
        lines.append(f"{first.kept} linear weights stay in bf16: {first.format} cannot take their shape")
    lines += ["", *_table("GiB a rank, without activations", [(f.format, f.memory) for f in footprints], GIB)]
    lines += ["", *_table("GB that a rank sends in a step", [(f.format, f.wire) for f in footprints], GB)]
    reduced = ", ".join(f"{f.format} {f.all_amaxes / GB:.3f}" for f in footprints)
    if first.busiest:
        lines += ["", f"Muon's operations on the rank that has most: {first.busiest:.2f} of the mean"]
    lines += ["", f"GB in the all-reduce of a host that gathers codes alone: {reduced}"]
    return "\n".join(lines)


def _table(title: str, columns: Sequence[tuple[str, dict[str, int]]], unit: int) -> list[str]:
    width = max(12, *(len(name) + 2 for name, _ in columns))
    lines = [f"{title:<34}" + "".join(f"{name:>{width}}" for name, _ in columns)]
    rows = {term: [terms[term] for _, terms in columns] for term in columns[0][1]}
    rows["total"] = [sum(terms.values()) for _, terms in columns]
    lines += [f"  {term:<32}" + "".join(f"{n / unit:>{width}.3f}" for n in row) for term, row in rows.items()]
    return lines


def _plot(footprints: Sequence[Footprint], title: str, path: Path) -> None:
    """Write a PNG with stacked bars: memory on the left, traffic on the right."""
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
    for position, total in enumerate(below):
        axes.annotate(f"{total:.1f}", (position, total), ha="center", va="bottom", fontsize=8)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    axes.margins(y=0.08)
