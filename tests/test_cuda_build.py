"""The CUDA part of the extension: what it was built for, and that Blackwell converts to FP4 in hardware, Hopper by arithmetic."""

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from zerocast import _C
from zerocast.backends.cuda.targets import why_no_kernels

pytestmark = pytest.mark.skipif(not hasattr(_C, "cuda"), reason="zerocast._C was built without CUDA kernels")


def targets() -> list[str]:
    found: list[str] = _C.cuda.targets().split()
    return found


def disassembler() -> str:
    """That of the CUDA toolkit, or the one that comes with Triton."""
    found = shutil.which("cuobjdump")
    if found is None:
        triton = pytest.importorskip("triton", reason="neither a cuobjdump nor Triton, which brings one")
        found = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    return found


@functools.cache
def machine_code(architecture: str) -> str:
    """The instructions of every kernel for this architecture."""
    command = [disassembler(), "--dump-sass", "--gpu-architecture", architecture, _C.__file__]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["100f", "120f"])
def test_blackwell_converts_in_hardware(target: str) -> None:
    if target not in targets():
        pytest.skip(f"built for {targets()}")
    assert re.search(r"F2FP\S*E2M1", machine_code(f"sm_{target}"))


@pytest.mark.parametrize("target", ["80", "90a"])
def test_older_ones_have_no_such_instruction(target: str) -> None:
    if target not in targets():
        pytest.skip(f"built for {targets()}")
    code = machine_code(f"sm_{target}")
    assert "cast_kernel" in code
    assert "E2M1" not in code.replace("E2M1E", "")  # the name of our type in the names of kernels


def test_every_kernel_is_there_for_every_target() -> None:
    kernels = {
        target: set(re.findall(r"Function : (\S+)", machine_code(f"sm_{target}")))
        for target in targets()
        if "+" not in target
    }
    first, *others = kernels.values()
    assert len(first) > 100
    assert all(other == first for other in others)


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
