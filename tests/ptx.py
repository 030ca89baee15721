"""The Triton kernels compiled for a GPU that is not there: `TRITON_INTERPRET=0 python -m tests.ptx 90` runs every stage, compiles
what it launches instead of launching it, and prints what the test asserts, as JSON. `--all` adds all nominal dtypes and kinds of
masters: minutes instead of a quarter of one.

A process of its own, since the interpreter and the compiler exclude each other. Stages are called as plans call them, so that the
kernels are specialised as they are in use, and none can be forgotten.
"""

import collections
import itertools
import json
import re
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests import devices
from tests.backends.test_adam_8bit import CUTS, CUTS_OF_MATRICES, MATRICES, SHAPES, Shard, weights
from tests.backends.test_adam_stages import Case
from tests.casts import NOMINAL
from tests.sharded import Weight
from tests.tables import STAGES, Bench
from zerocast import backends, get_format
from zerocast.formats import Columnwise, layout
from zerocast.formats.element import fp8
from zerocast.formats.layout import GradientMessage
from zerocast.gemm import triton_inputs

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
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(compiled: dict[str, dict[str, int]]) -> None:
    """Let launches compile only, and count the instructions of each kernel in `compiled`."""
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


def run_inputs_of_products() -> None:
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
    driver.set_active(Absent(int(capability)))
    devices.HERE.append("triton")  # what is not launched can be given CPU tensors
    compiled: dict[str, dict[str, int]] = {}
    compile_only(compiled)
    run_every_kernel()
    if "--all" in which:
        run_every_dtype()
    triton = backends.load("triton")
    print(json.dumps({"devices": triton.DEVICES, "preference": triton.PREFERENCE, "kernels": compiled}))


if __name__ == "__main__":
    main(*sys.argv[1:])
