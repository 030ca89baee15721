"""What Triton's compiler makes of the kernels for Hopper and Blackwell, without a GPU: exact arithmetic, wide loads and stores.

`TRITON_INTERPRET=0 python -m tests.backends.test_triton_ptx 90` runs every stage, compiles what it launches instead of launching
it, and prints what the tests assert, as JSON. `--all` adds all nominal dtypes and kinds of masters: minutes instead of a quarter of
one. It is a process of its own, since the interpreter and the compiler exclude each other. Stages are called as plans call them, so
that the kernels are specialised as they are in use, and none can be forgotten.
"""

import collections
import itertools
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests import devices
from tests.backends.stages import STAGES, Bench
from tests.backends.test_adam_8bit import CUTS, CUTS_OF_MATRICES, MATRICES, SHAPES, Shard, weights
from tests.backends.test_adam_stages import Case
from tests.casts import NOMINAL, Weight
from zerocast import backends, get_format
from zerocast.formats import Columnwise, layout
from zerocast.formats.element import fp8
from zerocast.formats.layout import GradientMessage

pytest.importorskip("triton", reason="Triton is not installed")

FORMATS = (
    "fp8_delayed",
    "fp8_current",
    "fp8_block",
    "mxfp8",
    "mxfp8:block=32x32",
    "mxfp4",
    "nvfp4",
    "int4",
    "identity",
)
INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+ )?([a-z]\w*\.[\w.:]+)", re.MULTILINE)


class Absent:
    """A driver that knows its GPU's architecture, and nothing else."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(compiled: dict[str, dict[str, int]]) -> None:
    """Let launches compile only, and count the instructions of each kernel in `compiled`."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def instead(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        assert kernel.metadata.enable_fp_fusion is False, "else the assembler contracts what the compiler did not"
        name = f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}"
        compiled[f"{name} {kernel.hash[:8]}"] = collections.Counter(INSTRUCTION.findall(kernel.asm["ptx"]))

    JITFunction.run = instead


def run_casts(fmt: str, nominal: torch.dtype, nominal_master: bool) -> None:
    bench = Bench((Weight(fmt, (64, 64), ((0, 4096),), nominal, nominal_master=nominal_master),), seed=2)
    for stage in filter(bench.applies, STAGES):
        bench.run(stage, "triton")


def run_adam_amax(fmt: str, nominal: torch.dtype, moment: torch.dtype) -> None:
    bench = Bench((Weight(fmt, (64, 64), ((0, 4096),), nominal),), seed=2)
    Case(bench, seed=1, grad=torch.bfloat16, moment=moment).run("triton")


def run_adam_8bit(fmt: str, dtype: torch.dtype) -> None:
    shapes, cuts = (MATRICES, CUTS_OF_MATRICES) if get_format(fmt).block else (SHAPES, CUTS)
    shard = Shard(weights(0, shapes=shapes), cuts, 1, fmt)
    for finishes in (False, True):
        shard.call("triton", [gradient.to(dtype) for gradient in weights(1, shapes=shapes)], 1, finishes)


def run_dequantize(fmt: str, nominal: torch.dtype, out: torch.dtype) -> None:
    spec, buffers = get_format(fmt), layout.buffers(get_format(fmt), (64, 64), nominal)
    empty = {name: torch.zeros(b.shape, dtype=b.dtype) if b else None for name, b in buffers.items()}
    for side in ("rowwise", "columnwise")[: 1 + (spec.columnwise is not Columnwise.NONE)]:
        arguments = empty[f"{side}_data"], empty[f"{side}_scale_inv"], empty["amax"], 64, 64, side == "columnwise"
        if arguments[0] is None:
            continue  # rowwise codes serve both directions
        backends.load("triton").dequantize(spec, *arguments, torch.empty(64, 64, dtype=out))


def run_upcast(transposed: bool) -> None:
    data, scale = torch.zeros((128, 64), dtype=torch.uint8), torch.zeros((128, 4), dtype=torch.uint8)
    made = torch.zeros((128, 128), dtype=torch.uint8), torch.zeros((1, 4))
    backends.load("triton").upcast(get_format("mxfp4"), data, scale, None, 128, 128, transposed, *made)


def run_gradient_messages(dtype: torch.dtype) -> None:
    messages, triton = torch.zeros(2 * GradientMessage(4096).nbytes, dtype=torch.uint8), backends.load("triton")
    triton.quantize_gradient(torch.zeros(8192, dtype=dtype), 2, messages)
    for adds in (False, True):
        triton.add_gradients(messages, 2, 2, adds, torch.zeros(4096))
        triton.add_gradients(torch.zeros(8192, dtype=dtype), 2, 2, adds, torch.zeros(4096))


def run_inputs_of_products() -> None:
    from zerocast.gemm import triton_inputs

    x = torch.zeros(256, 384, dtype=torch.bfloat16)
    triton_inputs.groups(x, 128, fp8("e4m3"), power_of_2=True)
    triton_inputs.per_tensor(x, fp8("e5m2"))


def run_every_kernel() -> None:
    run_gradient_messages(torch.bfloat16)
    run_inputs_of_products()
    for fmt in ("fp8_current", "fp8_block"):
        run_adam_8bit(fmt, torch.bfloat16)
    for fmt in ("fp8_delayed", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "int4", "identity"):
        run_casts(fmt, torch.bfloat16, nominal_master=False)
    for fmt in ("fp8_delayed", "nvfp4"):
        run_adam_amax(fmt, torch.bfloat16, torch.float32)
    for fmt in ("identity", "nvfp4"):
        run_dequantize(fmt, torch.bfloat16, torch.float16)
    for transposed in (False, True):
        run_upcast(transposed)


def run_every_dtype() -> None:
    for fmt in ("fp8_current", "fp8_block", "mxfp8", "mxfp8:block=32x32", "nvfp4"):
        run_adam_8bit(fmt, torch.float32)
    for dtype in (torch.float32, torch.float16):
        run_gradient_messages(dtype)
    for fmt, nominal in itertools.product(FORMATS, NOMINAL):
        for nominal_master in (False, True):
            run_casts(fmt, nominal, nominal_master)
        for dtype in (torch.float32, torch.bfloat16):
            if fmt != "identity":
                run_adam_amax(fmt, nominal, dtype)
            run_dequantize(fmt, nominal, dtype)


def main(capability: str, *which: str) -> None:
    from triton.runtime import driver

    driver.set_active(Absent(int(capability)))
    devices.HERE.append("triton")  # what is not launched can be given CPU tensors
    compiled: dict[str, dict[str, int]] = {}
    compile_only(compiled)
    run_every_kernel()
    if "--all" in which:
        run_every_dtype()
    triton = backends.load("triton")
    print(json.dumps({"devices": triton.DEVICES, "preference": triton.PREFERENCE, "kernels": compiled}))


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
    "compute_scales._roll",
    "transpose._data",
    "transpose._scales",
    "triton_inputs._groups",
    "triton_inputs._whole",
    "upcast._upcast",
}
# Approximate division and root, contracted multiply and add, and subnormals flushed to zero.
INEXACT = re.compile(r"div\.(full|approx)|sqrt\.approx|rcp\.|fma\.|\w+\..*ftz")


def compiled(capability: int, *which: str) -> dict[str, Any]:
    run = [sys.executable, "-m", "tests.backends.test_triton_ptx", str(capability), *which]
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


if __name__ == "__main__":
    main(*sys.argv[1:])
