"""The compiled backend is the one that casts CPU tensors: not a fallback, and not an old build."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests import casts
from tests.fsdp2 import models
from tests.observed import Dispatched
from tests.workers import on_ranks
from zerocast import CastPlan, QuantizedWeight, backends
from zerocast.backends.descriptor import Column
from zerocast.distributed.group import ONE_PROCESS

CPU = torch.device("cpu")


def test_the_extension_is_built_and_chosen() -> None:
    """The one test that must not be skipped: without it a broken build would run every other test on the reference."""
    assert backends.why_not("cpu", CPU) is None
    assert backends.choose(CPU) == os.environ.get("ZEROCAST_BACKEND", "cpu")
    weight = QuantizedWeight.empty((16, 16), "nvfp4")
    assert CastPlan([weight], [torch.ones(256)], [0], ONE_PROCESS).backend == backends.choose(CPU)


def test_the_extension_was_built_from_these_sources() -> None:
    from zerocast.backends import _C

    assert _C.columns() == [column.name for column in Column]
    assert _C.simd_level() == _C.simd_levels()[0], "the best level of this machine is in use"
    assert "baseline" in _C.simd_levels()
    with pytest.raises(ValueError, match="SIMD level 'mmx' is not usable here"):
        _C.set_simd_level("mmx")


def test_the_extension_has_no_torch_in_it() -> None:
    """One build serves every torch version: no symbol of torch or c10 is needed."""
    from zerocast.backends import _C

    content = Path(_C.__file__).read_bytes()
    assert not any(name in content for name in (b"libtorch", b"libc10", b"_ZN5torch", b"_ZN3c10", b"_ZNK3c10"))


@pytest.mark.parametrize(
    ("preference", "kind", "message"),
    [
        ("fast", ValueError, "unknown backend 'fast'"),
        ("report", ValueError, "unknown backend"),
        ("cpu", RuntimeError, "is for cpu tensors"),
    ],
)
def test_a_preference_that_cannot_be_met_raises(
    preference: str, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("meta")
    with pytest.raises(kind, match=message):
        backends.choose(device, preference)
    monkeypatch.setenv("ZEROCAST_BACKEND", preference)
    with pytest.raises(kind, match=message):
        backends.choose(device)


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROCAST_BACKEND", "reference")
    assert backends.choose(CPU) == "reference"
    assert backends.choose(CPU, "cpu") == "cpu", "what a caller says goes first"
    weight = QuantizedWeight.empty((16, 16), "nvfp4")
    with Dispatched() as ops:
        CastPlan([weight], [torch.ones(256)], [0], ONE_PROCESS).cast()
    assert ops.stages == ["partial_amax", "compute_scales", "partial_cast"]


def test_the_fallback_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    backends._automatic.cache_clear()
    with caplog.at_level(logging.WARNING, "zerocast"):
        assert backends.choose(torch.device("meta")) == "reference"
        assert backends.choose(torch.device("meta")) == "reference"
    (message,) = [r.getMessage() for r in caplog.records if "slow reference backend" in r.getMessage()]
    assert message.startswith("casting on meta with the slow reference backend (cpu: is for cpu tensors")


def test_a_build_without_cuda_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On a GPU: pip hides what the build printed about missing kernels."""
    reasons = {"triton": None, "cpu": "is for cpu tensors", "cuda": "built without CUDA", "reference": None}
    monkeypatch.setattr(backends, "why_not", lambda name, device: reasons[name])
    preferences = {"triton": SimpleNamespace(PREFERENCE=2), "reference": SimpleNamespace(PREFERENCE=0)}
    monkeypatch.setattr(backends, "load", lambda name: preferences[name])
    backends._automatic.cache_clear()
    with caplog.at_level(logging.WARNING, "zerocast"):
        assert [backends.choose(torch.device("cuda")) for _ in range(2)] == ["triton", "triton"]
    backends._automatic.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "casting on cuda with the triton backend, as the cuda backend cannot be used: built without CUDA"
    ]


def test_without_the_extension_and_triton_the_reasons_are_given() -> None:
    """A run that cannot load them still works, on the reference, and says why."""
    script = (
        "import sys; sys.modules['zerocast.backends._C'] = sys.modules['triton'] = None\n"
        "import torch\n"
        "from zerocast import backends\n"
        "print(backends.choose(torch.device('cpu')))\n"
        "print(backends.why_not('cpu', torch.device('cpu')))\n"
        "print(backends.why_not('triton', torch.device('cuda')))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "ZEROCAST_BACKEND"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    chosen, of_cpu, of_triton = run.stdout.splitlines()
    assert chosen == "reference"
    assert "cannot be loaded: install with `pip install .`" in of_cpu
    assert "Triton cannot be imported" in of_triton and "pip install 'zerocast[triton]'" in of_triton
    assert "slow reference backend" in run.stderr


def test_report_names_what_is_chosen() -> None:
    model = torch.nn.Linear(16, 16)
    model.weight = torch.nn.Parameter(casts.cast_whole("nvfp4", torch.ones(16, 16)))
    found = backends.report(model)
    chosen = {row.backend for row in found.backends if row.device == "cpu" and row.chosen}
    assert chosen == {backends.choose(CPU)}
    assert [(row.name, row.format) for row in found.layers] == [("weight", "nvfp4")]
    assert "chosen" in str(found)
    assert "dequantize to bfloat16" in str(found)


@on_ranks(1)
def test_a_layer_has_a_path_while_its_weight_is_gathered() -> None:
    model = models.sharded(models.Net(("fp8_current", "nvfp4"), 64, 96))
    assert not backends.report(model).layers
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    formats = [row.format for row in backends.report(model).layers]
    assert formats == ["fp8_current", "fp8_current", "nvfp4", "nvfp4"]
