"""The table of docs/tested.md: host x parallelism x format, and on how many ranks of what it passed, made from the recorded runs.

`python -m tests.hosts.table` (`make hosts-table`) writes it. Nothing in it is written by hand.
"""

import json
import os
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from itertools import count, groupby
from pathlib import Path
from typing import Any

from tests.hosts.record import FORMATS, HOSTS, PACKAGE_OF

RUNS = Path(__file__).parent / "recorded"
PAGE = Path(__file__).parents[2] / "docs" / "tested.md"
BEGIN, END = "<!-- begin: made by `make hosts-table` from tests/hosts/recorded -->\n", "<!-- end -->"
ON = ("CPU", "GPU")


def recorded() -> dict[str, dict[str, Any]]:
    """Return the recorded runs by the names of their files."""
    return {path.name: json.loads(path.read_text()) for path in sorted(RUNS.glob("*.json"))}


def table(runs: Iterable[dict[str, Any]]) -> str:
    """Return the Markdown table, and a line of what it was recorded with."""
    runs = list(runs)
    cells: dict[tuple[int, str], dict[str, dict[str, set[int]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(set))
    )
    for run in runs:
        for shown in run["passed"]:
            row = cells[list(HOSTS).index(shown["host"]), shown["parallel"]]
            row[shown["format"]][shown["on"]].add(shown["ranks"])
    head = ["host", "parallel over", *(f"`{name}`" for name in FORMATS)]
    lines = [head, ["---"] * len(head)]
    for (place, parallel), row in sorted(cells.items()):
        host, link = list(HOSTS.items())[place]
        lines.append(
            [f"[{host}]({os.path.relpath(link, PAGE.parent.name)})", parallel, *(_cell(row[name]) for name in FORMATS)]
        )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{_recorded_with(runs)}\n"


def _cell(by_device: dict[str, set[int]]) -> str:
    """Return the numbers of ranks on CPUs, then those on GPUs in brackets."""
    on_cpus, on_gpus = (_ranges(by_device[on]) for on in ON)
    return f"{on_cpus} ({on_gpus})".strip() if on_gpus else on_cpus


def _ranges(numbers: set[int]) -> str:
    """Write {1, 2, 3, 5} as 1-3, 5."""
    places = count()
    runs = [list(run) for _, run in groupby(sorted(numbers), key=lambda number: number - next(places))]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _recorded_with(runs: list[dict[str, Any]]) -> str:
    found = {"hosts": {package for run in runs for package in _packages(run)}}
    for device in ON:
        dates = defaultdict(set)
        for run in (run for run in runs if _ran(run, device)):
            dates[_machine(run, device)].add(run["date"])
        found[device] = {f"{machine} ({', '.join(sorted(days))})" for machine, days in dates.items()}
    parts = [f"{what}: {', '.join(sorted(values))}" for what, values in found.items() if values]
    return textwrap.fill(f"Recorded with {'; '.join(parts)}.", 100, break_on_hyphens=False)


def _packages(run: dict[str, Any]) -> set[str]:
    names = {PACKAGE_OF[shown["host"]] for shown in run["passed"] if shown["host"] in PACKAGE_OF}
    return {f"{name} {run['versions'][name]}" for name in names & {*run["versions"]}}


def _ran(run: dict[str, Any], device: str) -> bool:
    return any(shown["on"] == device for shown in run["passed"])


def _machine(run: dict[str, Any], device: str) -> str:
    gpus, cores, cpu = (run["hardware"][name] for name in ("gpus", "cores", "cpu"))
    what = f"{len(gpus)} {gpus[0]}" if device == "GPU" else f"{cores} cores of {cpu}"
    return f"torch {run['versions']['torch']} on {what}"


def with_table(text: str, made: str) -> str:
    """Return the text with the table between its marks. ValueError if they are missing."""
    found = re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: f"{BEGIN}\n{made}\n{END}", text, flags=re.DOTALL)
    if BEGIN not in text or END not in text.partition(BEGIN)[2]:
        raise ValueError(f"looked for {BEGIN.strip()} and {END}")
    return found


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), table(recorded().values())))
