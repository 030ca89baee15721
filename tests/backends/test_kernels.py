"""How the CUDA kernels are found: those of this build, those of a package, and those that do not fit."""

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import zerocast
from tests.docs.page import ROOT
from zerocast import backends
from zerocast.backends import extension
from zerocast.backends.extension import why_no_kernels
from zerocast.plugins import plugins

DIGEST = extension.load().KERNEL_SOURCES
LOCAL = "zerocast.backends._cuda"
PACKAGE = "zerocast-kernels-cu13"


def entry_points() -> str:
    """Those of the package, from its pyproject.toml."""
    (group, lines), *_ = re.findall(
        r'^\[project\.entry-points\."(.*)"\]\n((?:.+\n)+)',
        (ROOT / "kernels" / "pyproject.toml").read_text(),
        re.MULTILINE,
    )
    return f"[{group}]\n{lines}".replace('"', "")


def install(site: Path, module: str, version: str = zerocast.__version__) -> None:
    """Put a package into `site` whose kernels are this Python source."""
    (site / "zerocast_kernels").mkdir()
    (site / "zerocast_kernels" / "__init__.py").touch()
    (site / "zerocast_kernels" / "_cuda.py").write_text(module)
    metadata = site / "zerocast_kernels_cu13.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(entry_points())


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The one folder of packages, and no kernels of this build."""
    for name in ("zerocast_kernels", "zerocast_kernels._cuda"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, LOCAL, None)
    monkeypatch.setattr(sys, "path", [str(tmp_path), sysconfig.get_path("stdlib")])
    plugins.cache_clear()
    yield tmp_path
    plugins.cache_clear()
    for name in ("zerocast_kernels", "zerocast_kernels._cuda"):
        sys.modules.pop(name, None)


load = extension.load_kernels.__wrapped__  # what was found before is not asked for


def test_without_any_the_error_says_how_to_get_them(site: Path) -> None:
    with pytest.raises(
        ImportError, match=f"no CUDA kernels are installed: install the package {PACKAGE}, or build zerocast"
    ):
        load()


def test_those_of_the_package_are_found(site: Path) -> None:
    install(site, f"KERNEL_SOURCES = {DIGEST!r}")
    assert load().__name__ == "zerocast_kernels._cuda"


def test_those_of_other_sources_are_refused_with_both_versions(site: Path) -> None:
    install(site, "KERNEL_SOURCES = 'others'", "9.8.7")
    names = rf"of {PACKAGE} 9\.8\.7 and zerocast {re.escape(zerocast.__version__)} were built from different sources"
    with pytest.raises(ImportError, match=rf"{names} \(others and {DIGEST}\): install both in one version"):
        load()


@pytest.mark.parametrize(
    ("module", "problem"),
    [("raise OSError('libdl.so.9')", r"cannot be loaded: OSError\('libdl.so.9'\)"), ("", "has no KERNEL_SOURCES")],
)
def test_a_package_that_cannot_be_used_is_named(site: Path, module: str, problem: str) -> None:
    install(site, module)
    with pytest.raises(ImportError, match=f"of the package {PACKAGE} {re.escape(zerocast.__version__)} .*{problem}"):
        load()


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (f"KERNEL_SOURCES = {DIGEST!r}", None),
        ("KERNEL_SOURCES = 'others'", f"the CUDA kernels of {LOCAL} and zerocast .*, or build again"),
        ("raise ImportError('undefined symbol')", "undefined symbol"),
        ("import missing", "No module named 'missing'"),
    ],
)
def test_those_of_this_build_go_before_the_package(
    site: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    problem: str | None,
) -> None:
    """Also where they cannot be used: a build that is broken is mended, not hidden by the package."""
    install(site, f"KERNEL_SOURCES = {DIGEST!r}")
    folder = tmp_path_factory.mktemp("build")
    (folder / "_cuda.py").write_text(module)
    monkeypatch.setattr(backends, "__path__", [str(folder)])
    monkeypatch.delitem(sys.modules, LOCAL)
    monkeypatch.delattr(backends, "_cuda", raising=False)
    if problem is None:
        assert load().__file__ == str(folder / "_cuda.py")
    else:
        with pytest.raises(ImportError, match=problem):
            load()
    assert "zerocast_kernels" not in sys.modules


KERNELS_THAT_TELL = """
def targets(): return "90a"
def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    return 128 if name.isupper() else lambda *arguments: print(name, arguments[1])
"""


def test_the_backend_runs_on_those_of_the_package(tmp_path: Path) -> None:
    """With the arguments that csrc/api/cuda.cpp binds; without a GPU the kernels are all that is missing."""
    text = (ROOT / "csrc" / "api" / "cuda.cpp").read_text()
    bound = re.findall(r'bind_stage\(\w+, "(\w+)", &\w+,\s+([^;]*)\);', text)
    arguments = {stage: tuple(re.findall(r'"(\w+)"', names)) for stage, names in bound}
    assert len(arguments) == text.count("bind_stage(") > 10
    install(tmp_path, f"KERNEL_SOURCES, ARGUMENTS = {DIGEST!r}, {arguments}\n{KERNELS_THAT_TELL}")
    script = f"""
import sys
sys.modules[{LOCAL!r}] = None
import torch
from zerocast import backends
torch.cuda.is_available = lambda: False
print(backends.why_not("cuda", torch.device("cuda")))
from zerocast.backends.cuda import launch
launch._current_stream = lambda index: 0
backends.load("cuda").lay_out([torch.zeros(4)], 2, torch.zeros(4))
from zerocast.gemm import cuda_inputs
print(cuda_inputs.GROUP, cuda_inputs.serves(torch.device("cuda")))
"""
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert run.stdout.splitlines() == ["torch finds no CUDA device", "lay_out 2", "128 False"]


@pytest.mark.parametrize(
    ("built", "capability", "serves"),
    [
        ("90a", (9, 0), True),
        ("90a", (10, 0), False),
        ("100f", (10, 3), True),
        ("100f", (12, 0), False),
        ("80", (8, 9), True),
        ("80", (9, 0), False),
        ("90+PTX", (12, 1), True),
        ("90+PTX", (8, 0), False),
    ],
)
def test_which_gpus_a_target_serves(
    monkeypatch: pytest.MonkeyPatch, built: str, capability: tuple[int, int], serves: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    reason = why_no_kernels(built, torch.device("cuda", 0))
    assert (reason is None) == serves
    assert serves or f"targets {built}, none of which runs on a GPU" in str(reason)
