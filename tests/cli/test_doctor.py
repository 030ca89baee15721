"""zerocast doctor: a sound installation passes, a backend that writes one wrong byte or raises does not."""

import importlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.observed import Dispatched
from zerocast import backends, formats
from zerocast.backends import ops
from zerocast.cli import main, self_test

CPU = torch.device("cpu")
COMPILED = backends.choose(CPU)


@pytest.fixture(autouse=True)
def _no_interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test on the CPU, without Triton kernels that Python interprets, which have tests of their own."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(self_test, "usable", lambda device: [COMPILED] if COMPILED != "reference" else [])


def test_a_sound_installation(capsys):
    assert main(["doctor", "--seconds", "0", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    for text in ("torch", "communication: gloo", "chosen", "seed 3", "the same bytes in 1 round,"):
        assert text in said
    for name in formats.format_names():
        assert name == "identity" or f"  {name}" in said
    assert "\nno GPU was found: torch " in said
    assert said.endswith(f"verdict: right bytes; casts run with {COMPILED} on cpu\n")


def test_every_stage_of_a_step_takes_part() -> None:
    with Dispatched() as operators:
        self_test._results("reference", CPU, 3)
    of_products, of_gradients = {"upcast", "transposed"}, {"quantize_gradient", "add_gradients"}
    # Moments are FP32 by default.
    of_8_bits = {"adam_8bit", "adam_8bit_cast"}
    assert {*ops.STAGES} - of_products - of_gradients - of_8_bits <= {*operators.stages}


def test_lines_are_streamed(monkeypatch, capsys):
    """Lines that need no self-test appear before it."""

    def looked_at(*_: Any) -> list[Any]:
        assert "self-test against the reference, seed" in capsys.readouterr().out
        return []

    monkeypatch.setattr(importlib.import_module("zerocast.cli.doctor"), "self_test", looked_at)
    assert main(["doctor"]) == 0


def test_json(capsys):
    assert main(["doctor", "--seconds", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    sections = {"devices", "no_gpu", "communication", "backends", "products", "seed", "self_test", "verdict"}
    assert set(report) == sections
    (chosen,) = (row["backend"] for row in report["backends"] if row["device"] == "cpu" and row["chosen"])
    assert chosen == COMPILED
    assert [o["backend"] for o in report["self_test"]] == [name for name in [COMPILED] if name != "reference"]
    assert all(o["ok"] and o["rounds"] == 1 and o["nbytes"] > 100_000 for o in report["self_test"])
    assert report["devices"]["cpu"]["torch"] == torch.__version__


def test_the_draw_is_what_the_seed_says(monkeypatch):
    monkeypatch.setattr(self_test, "FORMATS", ("fp8_block", "nvfp4"))
    first, again, other = (self_test._results("reference", CPU, seed) for seed in (0, 0, 100))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(first[name].shape != other[name].shape for name in first)


WRITES = {
    "adam_amax": "masters",
    "adam_cast": "row_data",
    "compute_scales": "row_scales",
    "partial_cast": "row_data",
    "transpose": "column_data",
    "dequantize": "out",
}


TWO_PASSES = ("adam_amax", "partial_cast")


@pytest.mark.skipif(COMPILED == "reference", reason="needs a backend beside the reference")
@pytest.mark.parametrize("stage", WRITES)
def test_a_wrong_backend_is_found(monkeypatch, capsys, stage):
    """The doctor finds one wrong bit of each stage. The format is unique, since ops remember the function of a stage."""
    options = f"amax_epsilon={1 + list(WRITES).index(stage)}e-12,element=e5m2"
    # one rank casts fp8_block in the pass of Adam
    module, fmt = backends.load(COMPILED), f"{'fp8_current' if stage in TWO_PASSES else 'fp8_block'}:{options}"
    right = getattr(module, stage)

    names = [argument.name for argument in ops.arguments_of(stage)]

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        written = arguments[names.index(WRITES[stage])]
        written = written[0] if isinstance(written, list) else written
        written.view(-1).view(torch.uint8)[2] ^= 4

    monkeypatch.setattr(module, stage, wrong)
    monkeypatch.setattr(self_test, "FORMATS", (fmt,))
    assert main(["doctor", "--seconds", "0", "--json"]) == 1
    (outcome,) = json.loads(capsys.readouterr().out)["self_test"]
    assert not outcome["ok"]
    assert outcome["problem"].startswith(fmt)
    assert "(seed " in outcome["problem"]


@pytest.mark.skipif(COMPILED == "reference", reason="needs a backend beside the reference")
def test_a_backend_that_raises(monkeypatch, capsys):
    def broken(*fmt: Any, **arguments: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(backends.load(COMPILED), "partial_cast", broken)
    monkeypatch.setattr(self_test, "FORMATS", ("fp8_current:amax_epsilon=9e-13",))
    assert main(["doctor", "--seconds", "0"]) == 1
    said = capsys.readouterr().out
    assert "WRONG: RuntimeError: no kernel image (seed " in said
    assert said.endswith(f"verdict: do not train with {COMPILED} on cpu: its bytes differ from the reference\n")


def test_a_preference_that_cannot_be_met(monkeypatch, capsys):
    monkeypatch.setenv("ZEROCAST_BACKEND", "abacus")
    assert main(["doctor", "--seconds", "0"]) == 2
    assert "zerocast doctor: unknown backend 'abacus'" in capsys.readouterr().err


@pytest.mark.slow
def test_as_a_module():
    command = [sys.executable, "-m", "zerocast", "doctor", "--seconds", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert answer.returncode == 0, answer.stderr
    assert "the same bytes" in answer.stdout or COMPILED == "reference"
