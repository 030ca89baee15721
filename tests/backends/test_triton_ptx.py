"""What Triton's compiler makes of the kernels for Hopper and Blackwell, without a GPU: exact arithmetic, wide loads and stores."""

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

KERNELS = {
    "adam_8bit._blocks",
    "adam_8bit._cut_groups",
    "adam_8bit._groups",
    "adam_amax._blocks",
    "adam_amax._run",
    "compute_scales._blocks",
    "compute_scales._grid_maxima",
    "compute_scales._tensor",
    "dequantize._decode",
    "dequantize._round",
    "gradient_messages._add",
    "gradient_messages._quantize",
    "partial_amax._blocks",
    "partial_amax._run",
    "partial_cast._blocks",
    "partial_cast._round",
    "partial_cast._run",
    "roll_history._roll",
    "transpose._data",
    "transpose._scales",
    "triton_inputs._groups",
    "triton_inputs._whole",
    "upcast._upcast",
}
# Approximate division and root, contracted multiply and add, and subnormals flushed to zero.
INEXACT = re.compile(r"div\.(full|approx)|sqrt\.approx|rcp\.|fma\.|\w+\..*ftz")


def compiled(capability: int, *which: str) -> dict[str, Any]:
    run = [sys.executable, "-m", "tests.ptx", str(capability), *which]
    done = subprocess.run(run, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"}, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any]) -> None:
    kernels = found["kernels"]
    assert {name.split()[0] for name in kernels} == KERNELS
    for name, instructions in kernels.items():
        assert not [i for i in instructions if INEXACT.match(i)], name
        if name.startswith(("adam", "triton_inputs")):
            assert "div.rn.f32" in instructions, name
        if name.startswith("adam"):
            assert "sqrt.rn.f32" in instructions, name
        if name.startswith("adam_8bit._cut_groups"):
            continue  # two groups a piece, element by element
        if name.startswith(("adam", "partial_amax", "partial_cast")):
            assert "ld.global.v4.b32" in instructions, f"{name} has no wide loads"
        if name.startswith(("adam", "partial_cast", "transpose._data", "upcast")):
            assert "st.global.v4.b32" in instructions, f"{name} has no wide stores"


@pytest.mark.parametrize("capability", [90, pytest.param(100, marks=pytest.mark.slow)])
def test_kernels_are_exact_and_wide(capability: int) -> None:
    found = compiled(capability)
    check(found)
    assert (found["devices"], found["preference"]) == (["cuda"], 1), "compiled kernels are for GPUs only"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_kernels_of_every_dtype(capability: int) -> None:
    check(compiled(capability, "--all"))
