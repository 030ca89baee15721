"""How long a linear layer takes on a GPU: bf16, the weight dequantized, and FP8 tensor cores, forward and with the backward pass.

Every number is the median over `--repeats` of CUDA-event times around `CALLS` calls in a row, divided by their number, so that the
host is ahead of the device as in training; operands of the default size do not fit the L2 cache. With `--graph` these calls are
replayed as a CUDA graph, without any host. "input" is the quantization of the input alone and "product" what is left of the forward
pass without it.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

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
    against_bf16: float


def in_a_row(call: Callable[[], object]) -> None:
    """Make the calls that are timed together."""
    for _ in range(CALLS):
        call()


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """A replay of what these calls launch."""
    aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(aside):
        in_a_row(call)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        in_a_row(call)
    return graph.replay


def milliseconds(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """The median time of a call of each, on the device; they take turns, since a GPU changes its clocks."""
    times: list[list[float]] = [[] for _ in runs]
    for index in range(repeats + 2):
        for run, found in zip(runs, times, strict=True):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
            if index >= 2:
                found.append(start.elapsed_time(stop) / CALLS)
    return list(map(statistics.median, times))


@dataclass
class Layer:
    """A weight `[out, in]` and the path of its products, with an input and a gradient of the output."""

    format: str
    path: str
    preference: str
    weight: torch.Tensor
    x: torch.Tensor
    grad: torch.Tensor

    def calls(self) -> list[Callable[[], object]]:
        """What is timed: the forward pass, with the backward pass, the quantization of the input."""
        rows = self.x.detach()
        quantize = {
            "per_tensor": lambda: inputs.per_tensor(rows, E4M3),
            "block_128": lambda: inputs.groups(rows, 128, E4M3, True),
        }.get(self.path, lambda: None)
        return [self.forward, self.both, quantize]

    def forward(self) -> None:
        with torch.no_grad(), gemm.use(self.preference):
            F.linear(self.x, self.weight)

    def both(self) -> None:
        self.x.grad = self.weight.grad = None
        with gemm.use(self.preference):
            F.linear(self.x, self.weight).backward(self.grad)


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, nargs=3, default=[4096, 4096, 8192], metavar=("ROWS", "OUT", "IN"))
    parser.add_argument("--format", nargs="+", default=["fp8_current", "fp8_block", "mxfp4", "nvfp4"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    rows, out, inner = options.size
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn(rows, out, device="cuda", dtype=torch.bfloat16)
    plain = nn.Linear(inner, out, bias=False, device="cuda", dtype=torch.bfloat16).weight
    layers = [Layer("bf16", "torch", "auto", plain, x, grad)]
    for fmt in options.format:
        layer = nn.Linear(inner, out, bias=False, device="meta")
        layer.weight = nn.Parameter(plain.detach())
        zerocast.quantize_(layer, zerocast.Recipe({"weight": fmt}))
        path = str(layer.weight.gemm_choice().path)
        layers.append(Layer(fmt, "dequantize", "dequantize", layer.weight, x, grad))
        if path != "dequantize":
            layers.append(Layer(fmt, path, "auto", layer.weight, x, grad))
    calls = [call for layer in layers for call in layer.calls()]
    made = [replayed(call) if options.graph else partial(in_a_row, call) for call in calls]
    times = milliseconds(made, options.repeats)
    table = []
    for layer, (forward, both, quantizing) in zip(layers, zip(*[iter(times)] * 3, strict=True), strict=True):
        found = forward, both, quantizing, forward - quantizing, times[1] / both
        table.append(Row(layer.format, layer.path, *found))
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
