"""How long a linear layer takes on a GPU: bf16, the weight dequantized, and FP8 tensor cores, forward and with the backward pass.

Every number is the median over `--repeats` of CUDA-event times around `CALLS` calls in a row, divided by their number, so that the
host is ahead of the device as in training; operands of the default size do not fit the L2 cache. "input" is the quantization of the
input alone and "product" what is left of the forward pass without it.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn

import zerocast
from zerocast import gemm
from zerocast.formats.element import E4M3
from zerocast.gemm import inputs

CALLS = 10


@dataclass
class Row:
    """Milliseconds of one format on one path; `against_bf16` compares forward plus backward, above 1 is faster."""

    format: str
    path: str
    forward: float
    forward_and_backward: float
    input: float
    product: float
    against_bf16: float = 1.0


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Median time of a call on the device."""
    times = []
    for index in range(repeats + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            call()
        stop.record()
        torch.cuda.synchronize()
        if index >= 2:
            times.append(start.elapsed_time(stop) / CALLS)
    return sorted(times)[len(times) // 2]


def measure(
    fmt: str, path: str, weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, clock: Callable[..., float]
) -> Row:
    """One row; the input's share is known for the scaled paths only."""

    def both() -> None:
        x.grad = weight.grad = None
        F.linear(x, weight).backward(grad)

    with torch.no_grad():
        forward = clock(lambda: F.linear(x, weight))
        rows = x.detach()
        alone = {
            "per_tensor": lambda: inputs.per_tensor(rows, E4M3),
            "block_128": lambda: inputs.groups(rows, 128, E4M3, True),
        }.get(path)
        quantizing = clock(alone) if alone else 0.0
    return Row(fmt, path, forward, clock(both), quantizing, forward - quantizing)


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, nargs=3, default=[4096, 4096, 8192], metavar=("ROWS", "OUT", "IN"))
    parser.add_argument("--format", nargs="+", default=["fp8_current", "fp8_block", "mxfp4", "nvfp4"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    rows, out, inner = options.size
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn(rows, out, device="cuda", dtype=torch.bfloat16)
    layer = nn.Linear(inner, out, bias=False, device="cuda", dtype=torch.bfloat16)

    def clock(call: Callable[[], object]) -> float:
        return milliseconds(call, options.repeats)

    plain = layer.weight
    table = [measure("bf16", "torch", plain, x, grad, clock)]
    for fmt in options.format:
        layer.weight = nn.Parameter(plain.detach())
        zerocast.quantize_(layer, zerocast.Recipe({"weight": fmt}))
        preferences = ("dequantize", "auto") if layer.weight.gemm_choice().path != "dequantize" else ("dequantize",)
        for preference in preferences:
            with gemm.use(preference):
                table.append(measure(fmt, str(layer.weight.gemm_choice().path), layer.weight, x, grad, clock))
    for row in table:
        row.against_bf16 = table[0].forward_and_backward / row.forward_and_backward
    if options.json:
        print(json.dumps([asdict(row) for row in table], indent=2))
        return
    print(f"[{rows}, {inner}] x [{inner}, {out}] on {torch.cuda.get_device_name()}, torch {torch.__version__}, ms")
    print("| weight | path | forward | input | product | forward + backward | against bf16 |")
    print("|---|---|---|---|---|---|---|")
    for row in table:
        print(
            f"| {row.format} | {row.path} | {row.forward:.3f} | {row.input:.3f} | {row.product:.3f} "
            f"| {row.forward_and_backward:.3f} | {row.against_bf16:.2f}x |"
        )


if __name__ == "__main__":
    main()
