"""`zerocast plan --sweep`: what the collectives of a step carry as ranks grow."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from zerocast.cli.progress import tracked
from zerocast.footprint import Footprint, Parameter, Setup, footprint

RANKS = (8, 64, 512, 4096, 16384)
SHARDINGS = {"zero2": ("zero2", 0), "fsdp2": ("fsdp2", 0), "hsdp by 8": ("hsdp", 8), "hsdp by 64": ("hsdp", 64)}
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
LABEL, WIDTH = 42, 14
UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))


@dataclass(frozen=True)
class Sweep:
    """Footprints by sharding and number of ranks.

    A sharding in groups has no entry for fewer ranks than a group has.
    """

    footprints: dict[str, dict[int, Footprint]]

    @staticmethod
    def of(parameters: Sequence[Parameter], fmt: str, setup: Setup) -> "Sweep":
        """Every sharding of SHARDINGS on RANKS, with the config of `setup`."""
        found: dict[str, dict[int, Footprint]] = {}
        for name, (parallel, shards) in tracked(list(SHARDINGS.items()), lambda item: item[0]):
            setups = {n: replace(setup, parallel=parallel, ranks=n, shard_ranks=shards) for n in RANKS if n >= shards}
            found[name] = {n: footprint(parameters, fmt, one) for n, one in setups.items()}
        return Sweep(found)

    def as_dict(self) -> list[dict[str, Any]]:
        """Return the footprints as plain data, one entry for each sharding and number of ranks."""
        return [
            {"sharding": name, "ranks": ranks, **asdict(planned)}
            for name, by_ranks in self.footprints.items()
            for ranks, planned in by_ranks.items()
        ]

    def text(self) -> str:
        """A table for each sharding."""
        lines: list[str] = []
        for name, by_ranks in self.footprints.items():
            header = {ranks: f"{ranks:,} ranks" for ranks in by_ranks}
            lines += ["", f"{name:<{LABEL}}{_cells(header)}"]
            lines += [f"  {label:<{LABEL - 2}}{_cells(cells)}" for label, cells in self._rows(by_ranks)]
        return "\n".join(lines)

    def _rows(self, by_ranks: dict[int, Footprint]) -> Iterator[tuple[str, dict[int, str]]]:
        for collectives in zip(*(planned.collectives for planned in by_ranks.values()), strict=True):
            largest = collectives[-1]
            if largest.calls:
                calls = f"{largest.calls:,} call{'s' if largest.calls > 1 else ''}"
                by_place = zip(by_ranks, collectives, strict=True)
                yield f"{largest}, {calls}", {ranks: _bytes(one.sent) for ranks, one in by_place}
        memory = {ranks: f"{one.total_memory / 2**30:,.2f} GiB" for ranks, one in by_ranks.items()}
        yield "memory, without activations", memory

    def plot(self, title: str, path: Path) -> None:
        """Write a PNG: on the left what a rank sends, on the right what it holds."""
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        for (name, by_ranks), color in zip(self.footprints.items(), COLORS, strict=True):
            ranks, planned = list(by_ranks), list(by_ranks.values())
            style = {"color": color, "marker": "o", "markersize": 4}
            left.plot(ranks, [one.total_wire / 1e9 for one in planned], label=name, **style)
            right.plot(ranks, [one.total_memory / 2**30 for one in planned], label=name, **style)
        left.set_ylabel("GB that a rank sends in a step")
        right.set_ylabel("GiB a rank, without activations")
        left.set_ylim(bottom=0)
        right.set_yscale("log")
        for axes in (left, right):
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
