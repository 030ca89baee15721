"""`zerocast plan --sweep`: what the collectives of a step carry and cost as ranks grow."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from zerocast.cli.progress import tracked
from zerocast.footprint import Collective, Footprint, Network, Parameter, Setup, footprint

RANKS = (8, 64, 512, 4096, 16384)
SHARDINGS = {"zero2": ("zero2", 0), "fsdp2": ("fsdp2", 0), "hsdp by 8": ("hsdp", 8), "hsdp by 64": ("hsdp", 64)}
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
LABEL, WIDTH = 42, 14
UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))


@dataclass(frozen=True)
class Sweep:
    """Footprints by sharding and number of ranks, and the network that their costs are of.

    A sharding in groups has no entry for fewer ranks than a group has.
    """

    footprints: dict[str, dict[int, Footprint]]
    network: Network

    @staticmethod
    def of(parameters: Sequence[Parameter], fmt: str, setup: Setup, network: Network) -> "Sweep":
        """Every sharding of SHARDINGS on RANKS, with the config of `setup`."""
        found: dict[str, dict[int, Footprint]] = {}
        for name, (parallel, shards) in tracked(list(SHARDINGS.items()), lambda item: item[0]):
            setups = {n: replace(setup, parallel=parallel, ranks=n, shard_ranks=shards) for n in RANKS if n >= shards}
            found[name] = {n: footprint(parameters, fmt, one) for n, one in setups.items()}
        return Sweep(found, network)

    def milliseconds(self, collective: Collective) -> float:
        """The time of a collective's calls in a step."""
        return 1e3 * (self.network.waiting(collective) + self.network.sending(collective))

    def total(self, planned: Footprint) -> float:
        """Milliseconds of all collectives of a step, one after another."""
        return sum(map(self.milliseconds, planned.collectives))

    def waiting(self, planned: Footprint) -> float:
        """Milliseconds that hops take of these."""
        return 1e3 * sum(map(self.network.waiting, planned.collectives))

    def as_dict(self) -> list[dict[str, Any]]:
        """The footprints with their costs, for JSON."""
        return [
            {
                "sharding": name,
                "ranks": ranks,
                **asdict(planned),
                "milliseconds": {str(one): self.milliseconds(one) for one in planned.collectives},
                "milliseconds_of_hops": self.waiting(planned),
            }
            for name, by_ranks in self.footprints.items()
            for ranks, planned in by_ranks.items()
        ]

    def text(self) -> str:
        """A table for each sharding."""
        network = self.network
        lines = [
            f"a model, no measurement: nodes of {network.node_ranks} ranks; {network.node_bandwidth:g} GB/s and "
            f"{network.node_latency:g} us a hop within one,",
            f"{network.bandwidth:g} GB/s a rank and {network.latency:g} us a hop between them; nothing overlaps",
        ]
        for name, by_ranks in self.footprints.items():
            header = {ranks: f"{ranks:,} ranks" for ranks in by_ranks}
            lines += ["", f"{name:<{LABEL}}{_cells(header)}"]
            lines += [f"  {label:<{LABEL - 2}}{_cells(cells)}" for label, cells in self._rows(by_ranks)]
        return "\n".join(lines)

    def _rows(self, by_ranks: dict[int, Footprint]) -> Iterator[tuple[str, dict[int, str]]]:
        times = []
        for collectives in zip(*(planned.collectives for planned in by_ranks.values()), strict=True):
            largest = collectives[-1]
            if largest.calls:
                calls = f"{largest.calls:,} call{'s' if largest.calls > 1 else ''}"
                by_place = list(zip(by_ranks, collectives, strict=True))
                yield f"{largest}, {calls}", {ranks: _bytes(one.sent) for ranks, one in by_place}
                times.append((f"time of {largest}", {ranks: _time(self.milliseconds(one)) for ranks, one in by_place}))
        yield from times
        yield "time of all", {ranks: _time(self.total(one)) for ranks, one in by_ranks.items()}
        yield "time of all that hops take", {ranks: _time(self.waiting(one)) for ranks, one in by_ranks.items()}
        memory = {ranks: f"{one.total_memory / 2**30:,.2f} GiB" for ranks, one in by_ranks.items()}
        yield "memory, without activations", memory

    def plot(self, title: str, path: Path) -> None:
        """Write a PNG: on the left what a rank sends, on the right how long that takes."""
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        for (name, by_ranks), color in zip(self.footprints.items(), COLORS, strict=True):
            ranks, planned = list(by_ranks), list(by_ranks.values())
            style = {"color": color, "marker": "o", "markersize": 4}
            left.plot(ranks, [one.total_wire / 1e9 for one in planned], label=name, **style)
            right.plot(ranks, list(map(self.total, planned)), label=name, **style)
            right.plot(ranks, list(map(self.waiting, planned)), color=color, linestyle=":")
        left.set_ylabel("GB that a rank sends in a step")
        right.set_ylabel("ms of collectives in a step (dotted: hops), a model")
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


def _time(milliseconds: float) -> str:
    if milliseconds >= 10_000:
        return f"{milliseconds / 1e3:,.1f} s"
    return f"{milliseconds:,.3f} ms" if milliseconds < 1 else f"{milliseconds:,.1f} ms"
