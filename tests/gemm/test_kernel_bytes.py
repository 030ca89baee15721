"""No kernel of a compiled block takes more than three times what its bytes, or its operations, would take.

The trace names each kernel and the shapes that its operator was given. Products and attention are counted by operations.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import zerocast
from zerocast import gemm
from zerocast.bench.llama import SHAPES, Llama

CASES = {"A": ("llama3-8b", 1, 8192), "B": ("llama3-70b", 2, 4096), "C": ("llama3-8b", 1, 4096)}
FORMATS = ("fp8_current", "fp8_delayed", "fp8_block", "mxfp4", "mxfp8", "nvfp4")
LONG = 50.0  # microseconds
MOST = 3.0  # times of a copy of as many bytes, or of a product of as many operations
PRODUCTS = re.compile("gemm|nvjet|cutlass|xmma|flash|fmha|attention|cudnn", re.IGNORECASE)
BYTES = {"float": 4, "int": 4, "long": 8, "double": 8, "c10::BFloat16": 2, "c10::Half": 2}


class Kernel(NamedTuple):
    """One kernel of a trace: its name, the operator that launched it, and microseconds as measured and at the limit."""

    name: str
    operator: str
    took: float
    limit: float

    def __str__(self) -> str:
        return f"{self.took:8.0f} us {self.took / self.limit:6.2f}  {self.operator[:60]}  {self.name[:60]}"


def numel(dims: Any) -> int:
    """The elements of a tensor of the shape `dims`; 0 of anything else."""
    return math.prod(dims) if dims and all(isinstance(extent, int) for extent in dims) else 0


def nbytes(operator: dict[str, Any]) -> int:
    """The bytes of an operator's tensors. A Triton kernel is given all of them; what another operator
    returns counts as much as the largest that it is given.
    """
    given = operator["args"].get("Input Dims", []), operator["args"].get("Input type", [])
    sizes = [numel(dims) * BYTES.get(dtype, 1) for dims, dtype in zip(*given, strict=True)] or [0]
    return sum(sizes) + (0 if operator["name"].startswith("triton") else max(sizes))


def operations(operator: dict[str, Any]) -> float:
    """The operations of a product, or of attention without its mask, forward or backward."""
    dims = [shape for shape in operator["args"].get("Input Dims", []) if numel(shape)]
    if not dims:
        return 0.0
    if len(dims[0]) == 2:
        return 2.0 * dims[0][0] * dims[0][1] * dims[1][1]
    batch, heads, tokens, width = dims[0]
    products = 5 if "backward" in operator["name"] else 2
    return 2.0 * products * batch * heads * tokens * tokens * width


def kernels(path: Path, copy: float, product: float) -> Iterator[Kernel]:
    """The kernels of a chrome trace, beside limits in bytes and operations a microsecond."""
    events = json.loads(path.read_text())["traceEvents"]
    operators = {event["args"]["External id"]: event for event in events if event.get("cat") == "cpu_op"}
    for event in events:
        if event.get("cat") == "kernel":
            operator = operators.get(event["args"].get("External id"), {"name": "no operator", "args": {}})
            if PRODUCTS.search(event["name"]) and not operator["name"].startswith("triton"):
                limit = operations(operator) / product
            else:
                limit = nbytes(operator) / copy
            yield Kernel(event["name"], operator["name"], event["dur"], max(limit, 1e-3))


def rate(run: Callable[[], object], work: float) -> float:
    """Work a microsecond, the best of five."""
    best = math.inf
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3)
    return work / best


def traced(fmt: str, name: str, batch: int, seq: int) -> list[Kernel]:
    """The kernels of a block's forward and backward pass, by inductor, with FP8 weight gradients where a format has them."""
    torch._dynamo.reset()
    shape = SHAPES[name]
    source, square = (
        torch.ones(2**30, dtype=torch.uint8, device="cuda"),
        torch.randn(8192, 8192, device="cuda").bfloat16(),
    )
    target = torch.empty_like(source)
    copy = rate(lambda: target.copy_(source), 2.0 * source.nbytes)
    product = rate(lambda: square @ square, 2.0 * 8192**3)
    with torch.device("cuda"):
        model = Llama(shape, layers=1, vocabulary=16, sequence=seq).bfloat16()
        x = torch.randn(batch, seq, shape.dim, dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn_like(x)
    zerocast.quantize_(model, zerocast.Recipe({"blocks.*.w?.weight": fmt}))
    block = model.blocks[0]
    block.compile(fullgraph=True)
    with gemm.use(weight_gradients="fp8"), TemporaryDirectory() as folder:
        for _ in range(3):
            block(x, model.cos, model.sin).backward(grad)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
            block(x, model.cos, model.sin).backward(grad)
            torch.cuda.synchronize()
        profiler.export_chrome_trace(f"{folder}/trace.json")
        return list(kernels(Path(folder) / "trace.json", copy, product))


def test_the_limits_of_a_trace(tmp_path: Path) -> None:
    """At 1 byte and 2 operations a microsecond."""
    given = {"Input Dims": [[4, 8], [], [8, 2]], "Input type": ["c10::BFloat16", "Scalar", "float"]}
    names = ("triton_red_fused", "zerocast::turned", "aten::mm")
    operators = [
        {"cat": "cpu_op", "name": name, "args": {"External id": number, **given}} for number, name in enumerate(names)
    ]
    launched = [
        {"cat": "kernel", "name": name, "dur": 5.0, "args": {"External id": number}}
        for number, name in enumerate(("triton_red_fused", "transpose_kernel", "nvjet"))
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [*operators, *launched]}))
    limits = [kernel.limit for kernel in kernels(tmp_path / "trace.json", 1.0, 2.0)]
    assert limits == [64 + 64, 64 + 64 + 64, 4 * 8 * 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_no_kernel_takes_three_times_its_bytes(gpu_ranks: Any, fmt: str, case: str) -> None:
    (found,) = gpu_ranks(1)(traced, fmt, *CASES[case], timeout=300.0)
    long = sorted((kernel for kernel in found if kernel.took >= LONG), key=lambda kernel: -kernel.took)
    print(f"{case} {fmt}: {sum(kernel.took for kernel in found):,.0f} us", *long, sep="\n")
    slow = [str(kernel) for kernel in long if kernel.took > MOST * kernel.limit]
    assert long and not slow, "\n".join(slow)
