"""`zerocast plan --sweep`: the bytes in each collective of a step for growing numbers of ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zerocast.cli.output import tracked
from zerocast.footprint.footprint import Footprint, Setup, footprint
from zerocast.footprint.shapes import Parameter

RANKS = (8, 64, 512, 4096, 16384)
SHARDINGS = {"zero2": ("zero2", 0), "fsdp2": ("fsdp2", 0), "hsdp by 8": ("hsdp", 8), "hsdp by 64": ("hsdp", 64)}
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
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
        for (name, by_ranks), color in zip(self.footprints.items(), COLORS, strict=True):
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
