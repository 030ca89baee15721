"""The recipes of CONTRIBUTING.md: the files that it shows are put where it says, and are all that is needed."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

import zerocast
from tests.casts import raw
from tests.docs.page import ROOT
from zerocast import backends, formats

USABLE = [name for name in ("cpu", "reference") if backends.why_not(name, torch.device("cpu")) is None]
CACHES = (
    formats.format_names,
    formats._own_names,
    formats._build,
    backends.backend_names,
    backends._own_names,
    backends.load,
    backends._automatic,
)


def block(beginning: str) -> str:
    """The Python block of CONTRIBUTING.md that begins so."""
    document = Sybil([PythonCodeBlockParser()]).parse(ROOT / "CONTRIBUTING.md")
    (found,) = (str(example.parsed) for example in document if str(example.parsed).startswith(beginning))
    return found


def put(package: ModuleType, name: str, text: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A file more in a package."""
    (folder / f"{name}.py").write_text(text)
    patch.setattr(package, "__path__", [*package.__path__, str(folder)])
    for cache in CACHES:
        cache.cache_clear()


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    yield monkeypatch
    monkeypatch.undo()
    for cache in CACHES:
        cache.cache_clear()
    for name in ("zerocast.formats.fp8_square", "zerocast.backends.shadow"):
        sys.modules.pop(name, None)


def test_a_format_is_one_file(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put(formats, "fp8_square", block('"""fp8_square'), tmp_path, patch)
    master, found = torch.randn(200 * 300), []
    for backend in USABLE:
        weight = zerocast.QuantizedWeight.empty((200, 300), "fp8_square:element=e4m3")
        plan = zerocast.CastPlan([weight], [master], [0], backend=backend)
        plan.cast()
        plan.post_all_gather()
        found.append({name: raw(t).tobytes() for name, t in weight.state.buffers.items() if t is not None})
    assert len(found) == 2 and found[0] == found[1]
    assert weight.rowwise_scale_inv is not None and weight.rowwise_scale_inv.shape == (4, 8)

    model = torch.nn.Linear(128, 64)
    zerocast.quantize_(model, zerocast.Recipe({"weight": "fp8_square"}))
    optimizer = zerocast.ZeroAdamW(model.named_parameters())
    model(torch.randn(4, 128)).square().mean().backward()
    optimizer.step()
    assert zerocast.verify(optimizer).ok


def test_a_backend_is_one_module(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put(backends, "shadow", block('"""The shadow'), tmp_path, patch)
    assert "shadow" in backends.backend_names()
    assert backends.choose(torch.device("cpu")) == "cpu"
    patch.setenv("ZEROCAST_BACKEND", "shadow")
    assert backends.choose(torch.device("cpu")) == "shadow"
    weight = zerocast.QuantizedWeight.empty((64, 64), "nvfp4")
    plan = zerocast.CastPlan([weight], [torch.randn(64 * 64)], [0])
    plan.cast()
    assert plan.backend == "shadow" and weight.rowwise_data.any()
