"""Backends, formats and hosts of another package, which lies in `site/` as pip would install it."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import zerocast
from tests.casts import raw
from tests.docs.page import ROOT
from zerocast import backends, formats
from zerocast.plugins import FORMATS, plugins

SITE = Path(__file__).parent / "site"
PACKAGE = "squarecast 1.0"
CACHES = (plugins, formats.format_names, formats._build, backends.backend_names, backends.load, backends._automatic)


def forget() -> None:
    for cache in CACHES:
        cache.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("squarecast", "othercast")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package is installed during a test."""
    monkeypatch.syspath_prepend(SITE)
    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("name", ["fp8_square", "shadow"])
def test_the_recipes_of_the_guide_are_files_of_the_package(name: str) -> None:
    assert f"```python\n{(SITE / f'squarecast/{name}.py').read_text()}```" in (ROOT / "CONTRIBUTING.md").read_text()


def test_a_format_is_cast_alike_by_every_backend() -> None:
    master, found = torch.randn(200 * 300), []
    for backend in ("cpu", "reference"):
        weight = zerocast.QuantizedWeight.empty((200, 300), "fp8_square:element=e4m3")
        plan = zerocast.CastPlan([weight], [master], [0], backend=backend)
        plan.cast()
        plan.post_all_gather()
        found.append({name: raw(t).tobytes() for name, t in weight.state.buffers.items() if t is not None})
    assert found[0] == found[1]
    assert weight.rowwise_scale_inv is not None and weight.rowwise_scale_inv.shape == (4, 8)


def test_a_format_of_another_package_trains() -> None:
    assert "fp8_square" in formats.format_names() and "squarecast" not in sys.modules
    model = torch.nn.Linear(128, 64)
    zerocast.quantize_(model, zerocast.Recipe({"weight": "fp8_square:element=e4m3"}))
    optimizer = zerocast.ZeroAdamW(model.named_parameters())
    model(torch.randn(4, 128)).square().mean().backward()
    optimizer.step()
    assert zerocast.verify(optimizer).ok
    assert str(model.weight.format) == "fp8_square:element=e4m3"  # type: ignore[attr-defined]


def test_a_backend_of_another_package_casts_when_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"borrowed", "shadow"} <= {*backends.backend_names()}
    assert backends.choose(torch.device("cpu")) in ("cpu", "reference")  # whatever its PREFERENCE
    assert "squarecast" not in sys.modules
    monkeypatch.setenv("ZEROCAST_BACKEND", "borrowed")
    master = torch.randn(64 * 64)
    found = []
    for backend in ("reference", "shadow", None):
        weight = zerocast.QuantizedWeight.empty((64, 64), "nvfp4")
        plan = zerocast.CastPlan([weight], [master], [0], backend=backend)
        plan.cast()
        plan.post_all_gather()
        found.append([raw(buffer).tobytes() for buffer in weight.state.buffers.values() if buffer is not None])
    assert found[0] == found[1] == found[2]
    assert sys.modules["squarecast.borrowed"].casts == ["nvfp4"]  # type: ignore[attr-defined]


def test_a_host_of_another_package_is_imported_like_ours() -> None:
    from zerocast.integrations import plain_adam  # type: ignore[attr-defined]

    weights = [zerocast.QuantizedWeight.empty(shape, "nvfp4") for shape in ((64, 96), (96, 64))]
    masters = [torch.nn.Parameter(torch.randn(64 * 96)) for _ in weights]
    optimizer = torch.optim.AdamW(masters)
    attached, handle = plain_adam.attach(optimizer, weights, masters)
    before = weights[0].dequantize()
    for master in masters:
        master.grad = torch.randn_like(master)
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    assert zerocast.verify(attached).ok and not torch.equal(before, weights[0].dequantize())
    handle.remove()


def test_a_package_that_cannot_be_imported_is_named() -> None:
    """What asks for it gets the error; what does not, goes on."""
    reason = rf"of the package {PACKAGE} cannot be loaded: OSError\('libsquare.so.1"
    with pytest.raises(ImportError, match=rf"'broken_format' in the group zerocast.formats {reason}"):
        zerocast.get_format("broken_format")
    with pytest.raises(ImportError, match=rf"'broken_backend' in the group zerocast.backends {reason}"):
        backends.load("broken_backend")
    with pytest.raises(ImportError, match=rf"'broken_host' in the group zerocast.hosts {reason}"):
        from zerocast.integrations import broken_host  # type: ignore[attr-defined]  # noqa: F401
    rows = {row.backend: row for row in backends.report().backends if row.device == "cpu"}
    assert PACKAGE in rows["broken_backend"].reason and not rows["broken_backend"].usable
    assert rows["borrowed"].usable and not rows["borrowed"].chosen
    with pytest.raises(RuntimeError, match=f"'broken_backend' was asked for .* the package {PACKAGE}"):
        backends.choose(torch.device("cpu"), "broken_backend")


def test_modules_that_are_no_such_thing() -> None:
    with pytest.raises(ImportError, match=f"{PACKAGE} cannot be used: squarecast.plain_adam has no DEVICES"):
        backends.load("unlike_a_backend")
    with pytest.raises(ValueError, match="the format misnamed calls itself 'fp8_square'"):
        zerocast.get_format("misnamed")


def test_a_name_of_ours_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert formats.format_names().count("nvfp4") == 1
    assert f"'nvfp4' in the group zerocast.formats of the package {PACKAGE} is ignored" in caplog.text
    assert zerocast.get_format("nvfp4").block == (16, 16)


def test_a_name_of_two_packages_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "othercast-2.0.dist-info").mkdir()
    (tmp_path / "othercast-2.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: othercast\nVersion: 2.0\n"
    )
    entries = "[zerocast.formats]\nfp8_square = othercast\n"
    (tmp_path / "othercast-2.0.dist-info" / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="unknown format 'fp8_square'"):
        zerocast.get_format("fp8_square")
    assert "are ignored: they have the same name" in caplog.text
    assert "othercast 2.0" in caplog.text and PACKAGE in caplog.text


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="unknown format 'fp8_squar'; did you mean 'fp8_square'"):
        zerocast.get_format("fp8_squar")
    with pytest.raises(ValueError, match=r"unknown backend 'none'; known: cpu, .*, borrowed, .*shadow"):
        backends.load("none")
    with pytest.raises(ImportError, match="cannot import name 'none'"):
        from zerocast.integrations import none  # type: ignore[attr-defined]  # noqa: F401


def test_doctor_says_which_formats_of_other_packages_cannot_be_used() -> None:
    from zerocast.cli import doctor

    usable, reasons = doctor._usable_formats()
    assert "fp8_square" in usable and len(reasons) == 2
    assert PACKAGE in reasons[0] and "misnamed" in reasons[1]


def test_nothing_is_read_or_imported_before_it_is_asked_for() -> None:
    """Neither by `import zerocast` nor by a cast with a format and a backend of our own."""
    script = f"""
import sys
sys.path.insert(0, {str(SITE)!r})
from importlib import metadata
asked = []
entry_points = metadata.entry_points
import torch
metadata.entry_points = lambda **query: asked.append(query.get("group")) or entry_points(**query)
import zerocast, zerocast.integrations
weight = zerocast.QuantizedWeight.empty((64, 64), "nvfp4")
zerocast.CastPlan([weight], [torch.randn(64 * 64)], [0]).cast()
ours = lambda: [group for group in asked if group and group.startswith("zerocast")]
print(ours(), "squarecast" in sys.modules)
zerocast.get_format("fp8_square")
print(ours())
print([name for name in sys.modules if name.startswith("squarecast")])
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [
        "[] False",
        f"[{FORMATS!r}]",
        "['squarecast', 'squarecast.fp8_square']",
    ]
