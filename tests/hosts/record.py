"""`pytest --record-hosts FILE`: what tests that are marked `shows` have shown, of each host in which format on how many ranks.

A test says it by `@pytest.mark.shows(host=, parallel=, formats=, ranks=)`. All but the host are values, or functions of those
parameters of the test that they name; `ranks` can be left out where a parameter is called `world`. The file is evidence: what
passed by which tests, on what hardware, with which versions, by which command. A combination counts if none of its tests failed.

`python -m tests.hosts.record` (`make hosts-table`) makes the table of docs/tested.md of the recorded runs: host x parallelism x
format, and on how many ranks of what it passed. Nothing in it is written by hand.
"""

import contextlib
import inspect
import json
import os
import platform
import re
import shlex
import subprocess
import textwrap
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from datetime import date
from importlib import metadata
from itertools import count, groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

HOSTS = {  # in the order of the table, each with what is to be read about it
    "ZeroAdamW": "zerocast/optim",
    "CastPlan": "docs/quickstart/cast.md",
    "FSDP2": "zerocast/fsdp2",
    "Megatron-Core": "integrations/megatron",
    "TransformerEngine": "integrations/transformer_engine",
    "Apex": "integrations/apex",
    "torchtitan": "integrations/torchtitan",
}
FORMATS = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "mxfp4", "nvfp4")
PACKAGE_OF = {"Megatron-Core": "megatron-core", "TransformerEngine": "transformer-engine", "torchtitan": "torchtitan"}
PACKAGES = ("torch", "triton", *PACKAGE_OF.values())


class Shown(NamedTuple):
    """One combination: the host with this kind of parallelism on so many ranks, in a format, on CPU (gloo) or GPU (NCCL)."""

    host: str
    parallel: str
    ranks: int
    format: str
    on: str


def shown_by(mark: pytest.Mark, parameters: Mapping[str, Any], on_gpu: bool) -> set[Shown]:
    """Return what a test with this mark and these parameters shows. ValueError for a host that the table lacks."""
    said = {"ranks": lambda world: world, **mark.kwargs}
    if said["host"] not in HOSTS:
        raise ValueError(f"shows(host={said['host']!r}): the hosts of the table are {', '.join(HOSTS)}")
    parallel, ranks, formats = (_value(said[name], parameters) for name in ("parallel", "ranks", "formats"))
    names = {name.partition(":")[0] for name in formats} & {*FORMATS}
    return {Shown(said["host"], parallel, ranks, name, "GPU" if on_gpu else "CPU") for name in names}


def _value(said: Any, parameters: Mapping[str, Any]) -> Any:
    if not callable(said):
        return said
    return said(*(parameters[name] for name in inspect.signature(said).parameters))


class Recorder:
    """A plugin that listens to a run of pytest, and writes at its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._passed: dict[Shown, set[str]] = defaultdict(set)
        self._failed: set[Shown] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Function) -> Generator[None, Any, None]:
        """Let the report say what a marked test shows: it may be made in another process, a worker of pytest-xdist."""
        report = (yield).get_result()
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        for mark in item.iter_markers("shows"):
            for shown in shown_by(mark, parameters, item.get_closest_marker("gpu") is not None):
                report.user_properties.append(("shows", tuple(shown)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for shown in (Shown(*value) for name, value in report.user_properties if name == "shows"):
            if report.failed:
                self._failed.add(shown)
            elif report.passed and report.when == "call":
                self._passed[shown].add(report.nodeid.partition("[")[0])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the evidence, but for workers of pytest-xdist: their reports have gone to who started them."""
        if hasattr(session.config, "workerinput"):
            return
        passed = sorted((shown, sorted(tests)) for shown, tests in self._passed.items() if shown not in self._failed)
        line = [
            argument.replace(str(self._path), self._path.name) for argument in session.config.invocation_params.args
        ]
        evidence = {
            "date": date.today().isoformat(),
            "command": f"python -m pytest {shlex.join(line)}",
            "commit": _commit(session.config.rootpath),
            "hardware": _hardware(),
            "versions": {"python": platform.python_version()} | _versions(),
            "passed": [{**shown._asdict(), "tests": tests} for shown, tests in passed],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(evidence, indent=1) + "\n")


def _commit(root: Path) -> str | None:
    """Return the commit, or None outside of a repository and for files that differ from it. ZEROCAST_COMMIT
    tells it to a machine with files alone.
    """
    if "ZEROCAST_COMMIT" in os.environ:
        return os.environ["ZEROCAST_COMMIT"]
    line = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip()
    return None if found.endswith("-dirty") else found or None


def _hardware() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"cpu": models[0] if models else platform.machine(), "cores": os.cpu_count(), "gpus": gpus}


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-hosts", type=Path, metavar="FILE", help="write what tests marked `shows` have shown")


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder, if it is asked for."""
    if config.getoption("--record-hosts"):
        config.pluginmanager.register(Recorder(config.getoption("--record-hosts")))


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
