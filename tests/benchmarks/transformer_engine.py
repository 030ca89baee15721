"""Host time of a call of zerocast.integrations.transformer_engine over many weights, beside TransformerEngine's own call.

Every weight is owned whole by this one process, so what is timed beyond the cast itself is the work of the host. "host" is the
time until the call returns, "done" until the device has finished too. TransformerEngine's own calls need its compiled kernels: with
a GPU both are timed, without one zerocast alone, over TransformerEngine's own tensor classes (see tests/transformer_engine).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tests.sharded import Weight
from tests.transformer_engine.host_on_cpu import WHY_NOT, WITH_GPU, host_on_cpu, integration
from tests.transformer_engine.tensors import tensor

FORMATS = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
CASTS_FP4_FROM = (10, 0)  # the compute capability that TransformerEngine's cast to NVFP4 needs


def milliseconds(call: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Median times of a call, until it returns and until the device is done, after a warm-up."""
    for _ in range(3):
        call()
    wait = torch.cuda.synchronize if WITH_GPU else lambda: None
    host, done = [], []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
        wait()
        done.append(time.perf_counter() - start)
    return median(host) * 1e3, median(done) * 1e3


def calls_of(fmt: str, count: int, edge: int, module: Any) -> dict[str, Callable[[], None]]:
    """The two calls of a module over `count` weights of edge x edge, their masters in tensors of their own."""
    device, case = "cuda" if WITH_GPU else "cpu", Weight(fmt, (edge, edge), ((0, edge * edge),))
    weights = [tensor(case, device, columnwise=True) for _ in range(count)]
    masters, starts = [torch.randn(edge * edge, device=device) for _ in weights], [0] * count
    group = dist.group.WORLD if dist.is_initialized() else None
    return {
        "quantize_master_weights": lambda: module.quantize_master_weights(weights, masters, starts, group, None, True),
        "post_all_gather_processing": lambda: module.post_all_gather_processing(weights),
    }


def modules() -> dict[str, Any]:
    """Whose calls can be timed here."""
    if not WITH_GPU:
        return {"zerocast": integration()}
    import transformer_engine.pytorch.tensor.utils as theirs

    return {"TransformerEngine": theirs, "zerocast": integration()}


def measure(count: int, edge: int, repeats: int) -> list[dict[str, Any]]:
    """One row for each format, call and module."""
    rows: list[dict[str, Any]] = []
    for fmt in FORMATS:
        for whose, module in modules().items():
            for call, run in calls_of(fmt, count, edge, module).items():
                cast_by_te = whose == "TransformerEngine" and call == "quantize_master_weights"
                if fmt == "nvfp4" and cast_by_te and torch.cuda.get_device_capability() < CASTS_FP4_FROM:
                    continue
                host, done = milliseconds(run, repeats)
                rows.append({"format": fmt, "call": call, "of": whose, "host_ms": host, "done_ms": done})
    return rows


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=256, help="weights")
    parser.add_argument("--edge", type=int, default=1024 if WITH_GPU else 32, help="rows and columns of each")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if WHY_NOT:
        sys.exit(WHY_NOT)
    if WITH_GPU:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    with host_on_cpu():
        rows = measure(options.count, options.edge, options.repeats)
    if dist.is_initialized():
        dist.destroy_process_group()
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{options.count} weights of {options.edge}x{options.edge}")
    for row in rows:
        times = f"host {row['host_ms']:7.2f} ms, done {row['done_ms']:7.2f} ms"
        print(f"{row['format']:<12}{row['call']:<28}{row['of']:<18}{times}")


if __name__ == "__main__":
    main()
