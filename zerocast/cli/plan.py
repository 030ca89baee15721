"""`zerocast plan`: the bytes of a model in memory and in communication, without a machine to run
it.

Nothing here imports torch, except to build a model from its config.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerocast.cli import print_error
from zerocast.cli.options import PlanConfig
from zerocast.cli.output import check_folder, tracked, written
from zerocast.distributed.bucket import BUCKET_SIZE
from zerocast.footprint.footprint import Footprint, Setup, footprint
from zerocast.footprint.model_files import Model, Parameter, read_model
from zerocast.footprint.weight_bytes import PlannedConfig
from zerocast.formats import get_format

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The numbers of ranks and the shardings of --sweep.
RANKS = (8, 64, 512, 4096, 16384)
SHARDINGS = {"zero2": ("zero2", 0), "fsdp2": ("fsdp2", 0), "hsdp by 8": ("hsdp", 8), "hsdp by 64": ("hsdp", 64)}
LINE_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
LABEL, WIDTH = 42, 14
UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))


@dataclass(frozen=True)
class Sweep:
    """Footprints by sharding and number of ranks.

    A sharding in groups has no entry if there are fewer ranks than one group has.
    """

    footprints: dict[str, dict[int, Footprint]]

    @staticmethod
    def compute(parameters: Sequence[Parameter], fmt: str, setup: Setup) -> "Sweep":
        """Plan every sharding of SHARDINGS on RANKS, with the config of `setup`."""
        footprints: dict[str, dict[int, Footprint]] = {}
        for name, (parallel, shard_ranks) in tracked(list(SHARDINGS.items()), lambda item: item[0]):
            footprints[name] = {}
            for ranks in RANKS:
                if ranks >= shard_ranks:
                    sharding = replace(setup, parallel=parallel, ranks=ranks, shard_ranks=shard_ranks)
                    footprints[name][ranks] = footprint(parameters, fmt, sharding)
        return Sweep(footprints)

    def as_dict(self) -> list[dict[str, Any]]:
        """Return the footprints as plain data, one entry for each sharding and number of ranks."""
        return [
            {"sharding": name, "ranks": ranks, **asdict(planned)}
            for name, by_ranks in self.footprints.items()
            for ranks, planned in by_ranks.items()
        ]

    def text(self) -> str:
        """Return a table for each sharding."""
        lines: list[str] = []
        for name, by_ranks in self.footprints.items():
            header = {ranks: f"{ranks:,} ranks" for ranks in by_ranks}
            lines += ["", f"{f'{name}, sent per rank':<{LABEL}}{_cells(header)}"]
            lines += [f"  {label:<{LABEL - 2}}{_cells(cells)}" for label, cells in self._rows(by_ranks)]
        return "\n".join(lines)

    def _rows(self, by_ranks: dict[int, Footprint]) -> Iterator[tuple[str, dict[int, str]]]:
        for collectives in zip(*(planned.collectives for planned in by_ranks.values()), strict=True):
            largest = collectives[-1]
            if largest.calls:
                calls = f"{largest.calls:,} call{'s' if largest.calls > 1 else ''}"
                sent = {ranks: _bytes(each.sent) for ranks, each in zip(by_ranks, collectives, strict=True)}
                yield f"{largest}, {calls}", sent
        memory = {ranks: f"{planned.total_memory / 2**30:,.2f} GiB" for ranks, planned in by_ranks.items()}
        yield "memory per rank, without activations", memory

    def plot(self, title: str, path: Path) -> None:
        """Write a PNG: on the left the bytes that a rank sends, on the right its memory."""
        # matplotlib takes a second to import.
        from matplotlib.figure import Figure  # noqa: PLC0415

        figure = Figure(figsize=(11, 4.5), layout="constrained")
        traffic, memory = figure.subplots(1, 2)
        for (name, by_ranks), color in zip(self.footprints.items(), LINE_COLORS, strict=True):
            ranks = list(by_ranks)
            style = {"color": color, "marker": "o", "markersize": 4}
            traffic.plot(ranks, [planned.total_wire / 1e9 for planned in by_ranks.values()], label=name, **style)
            memory.plot(ranks, [planned.total_memory / 2**30 for planned in by_ranks.values()], label=name, **style)
        traffic.set_ylabel("GB sent per rank and step")
        memory.set_ylabel("GiB per rank, without activations")
        traffic.set_ylim(bottom=0)
        memory.set_yscale("log")
        for axes in (traffic, memory):
            axes.set(xscale="log", xlabel="ranks", xticks=RANKS, xticklabels=[f"{n:,}" for n in RANKS])
            axes.minorticks_off()
            axes.legend(fontsize=8)
        figure.suptitle(title, fontsize=10)
        figure.savefig(path, dpi=120)


def _cells(by_ranks: dict[int, str]) -> str:
    return "".join(f"{by_ranks.get(ranks, ''):>{WIDTH}}" for ranks in RANKS)


def _bytes(count: int) -> str:
    unit, name = next((unit, name) for unit, name in UNITS if count >= unit or unit == 1)
    return f"{count / unit:,.{0 if unit == 1 else 2}f} {name}"


GIB = 2**30
GB = 10**9
COLORS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#f0e442", "#d55e00", "#cc79a7")
# The formats that every plan is compared with.
COMPARED = ("fp8_block", "bf16")
# GiB that torch reports as the memory of a GPU.
GPUS = {"H100": 79.1, "H200": 139.8, "B200": 178.4}


def report(config: PlanConfig, model: Model) -> str:
    """Return the output of `zerocast plan`, after writing the PNG. Raises ValueError for an
    impossible setup.
    """
    return _sweep_text(config, model) if config.sweep else _plan_text(config, model)


def _plan_text(config: PlanConfig, model: Model) -> str:
    """Return the output for one setup. Also writes the PNG."""
    setup = _setup(config)
    formats = list(dict.fromkeys([config.format, *COMPARED]))
    footprints = [footprint(model.parameters, fmt, setup) for fmt in tracked(formats)]
    if config.png:
        with written(config.png) as path:
            _plot(footprints, _title(config, footprints[0]), path)
    return json.dumps(_as_dict(config, footprints), indent=2) if config.json else _text(config, model, footprints)


def _sweep_text(config: PlanConfig, model: Model) -> str:
    """Return the output of --sweep. Also writes the PNG."""
    for name in ("ranks", "parallel", "shard_ranks", "optimizer"):
        if getattr(config, name) != getattr(PlanConfig, name):
            raise ValueError(
                f"a sweep has its own ranks and shardings, with AdamW: leave out --{name.replace('_', '-')}"
            )
    sweep = Sweep.compute(model.parameters, config.format, _setup(config))
    numel = sum(math.prod(parameter.shape) for parameter in model.parameters)
    title = f"{_name(config)}: {numel:,} parameters, {config.format}, a step with one micro-batch"
    if config.png:
        with written(config.png) as path:
            sweep.plot(title, path)
    if config.json:
        return json.dumps({"plan": _options(config), "sweep": sweep.as_dict()}, indent=2)
    return "\n".join([title, *_not_counted(model), sweep.text()])


def _setup(config: PlanConfig) -> Setup:
    zero = PlannedConfig(
        bucket_size=BUCKET_SIZE if config.bucket_size is None else config.bucket_size,
        grad_wire=config.grad_wire,
        grad_dtype=config.grad_dtype,
        moment_dtype=config.moment_dtype,
        keep_columnwise=config.keep_columnwise,
    )
    return Setup(config.parallel, config.ranks, config.shard_ranks, zero, config.optimizer)


def _options(config: PlanConfig) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}


def _as_dict(config: PlanConfig, footprints: Sequence[Footprint]) -> dict[str, Any]:
    entries = []
    for planned in footprints:
        totals = {"wire": planned.wire, "total_memory": planned.total_memory, "total_wire": planned.total_wire}
        entries.append({**asdict(planned), **totals})
    return {"plan": _options(config), "footprints": entries}


def _name(config: PlanConfig) -> str:
    path = Path(config.model)
    return path.resolve().name if path.is_dir() else path.stem


def _not_counted(model: Model) -> list[str]:
    return [f"not counted: {model.not_counted}"] if model.not_counted else []


def _title(config: PlanConfig, planned: Footprint) -> str:
    groups = f", shards of {config.shard_ranks}" if config.parallel == "hsdp" else ""
    optimizer = " with muon" if config.optimizer == "muon" else ""
    return (
        f"{_name(config)}: {planned.numel:,} parameters, {config.parallel}{optimizer} on {config.ranks:,} ranks{groups}"
    )


def _text(config: PlanConfig, model: Model, footprints: Sequence[Footprint]) -> str:
    first = footprints[0]
    lines = [
        _title(config, first),
        *_not_counted(model),
        f"{first.quantized:,} of them in {first.format}, the rest in bf16",
    ]
    if first.kept:
        lines.append(f"{first.kept} linear weights stay in bf16: {first.format} does not support their shape")
    lines += ["", *_table("GiB per rank, without activations", [(f.format, f.memory) for f in footprints], GIB)]
    lines += ["", *_left_table(footprints)]
    lines += ["", *_table("GB sent per rank and step", [(f.format, f.wire) for f in footprints], GB)]
    reduced = ", ".join(f"{f.format} {f.all_amaxes / GB:.3f}" for f in footprints)
    if first.busiest:
        lines += ["", f"Muon's operations on the rank with the most: {first.busiest:.2f} of the mean"]
    lines += ["", f"GB in the all-reduce of a framework that gathers codes only: {reduced}"]
    return "\n".join(lines)


def _left_table(footprints: Sequence[Footprint]) -> list[str]:
    """Return the table of the memory of a GPU that remains for activations."""
    width = _width([planned.format for planned in footprints])
    lines = ["GiB per rank that remain for activations"]
    for gpu, capacity in GPUS.items():
        left = [capacity - planned.total_memory / GIB for planned in footprints]
        cells = [f"{gib:.1f}" if gib > 0 else "does not fit" for gib in left]
        lines.append(f"  {f'{gpu}, {capacity} GiB':<32}" + "".join(f"{cell:>{width}}" for cell in cells))
    return lines


def _width(names: Sequence[str]) -> int:
    """Return the width of a column of numbers under these names."""
    return max(14, *(len(name) + 2 for name in names))


def _table(title: str, columns: Sequence[tuple[str, dict[str, int]]], unit: int) -> list[str]:
    width = _width([name for name, _ in columns])
    lines = [f"{title:<34}" + "".join(f"{name:>{width}}" for name, _ in columns)]
    rows = {term: [terms[term] for _, terms in columns] for term in columns[0][1]}
    rows["total"] = [sum(terms.values()) for _, terms in columns]
    lines += [f"  {term:<32}" + "".join(f"{n / unit:>{width}.3f}" for n in row) for term, row in rows.items()]
    return lines


def _plot(footprints: Sequence[Footprint], title: str, path: Path) -> None:
    """Write a PNG with stacked bars: memory on the left, traffic on the right."""
    # matplotlib takes a second to import.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _stack(left, [(f.format, f.memory) for f in footprints], GIB)
    left.set_ylabel("GiB per rank, without activations")
    _stack(right, [(f.format, f.wire) for f in footprints], GB)
    right.set_ylabel("GB sent per rank and step")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def _stack(axes: "Axes", bars: Sequence[tuple[str, dict[str, int]]], unit: int) -> None:
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


def plan(config: PlanConfig) -> int:
    """Run `zerocast plan`; returns the exit status."""
    try:
        check_folder(config.png)
        if config.format != "bf16":
            get_format(config.format)
        model = read_model(config.model)
        text = report(config, model)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print_error(f"zerocast plan: {error}")
        return 2
    print(text)
    return 0
