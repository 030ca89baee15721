"""`pytest --record-hosts FILE`: what tests that are marked `shows` have shown, of each host in which format on how many ranks.

A test says it by `@pytest.mark.shows(host=, parallel=, formats=, ranks=)`. All but the host are values, or functions of those
parameters of the test that they name; `ranks` can be left out where a parameter is called `world`. The file is evidence: what
passed by which tests, on what hardware, with which versions, by which command. A combination counts if none of its tests failed.
"""

import inspect
import json
import os
import platform
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Generator, Mapping
from datetime import date
from importlib import metadata
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
    installed = {name: metadata.distribution(name) for name in PACKAGES if _is_installed(name)}
    return {name: found.version for name, found in installed.items()}


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-hosts", type=Path, metavar="FILE", help="write what tests marked `shows` have shown")


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder, if it is asked for."""
    if config.getoption("--record-hosts"):
        config.pluginmanager.register(Recorder(config.getoption("--record-hosts")))
