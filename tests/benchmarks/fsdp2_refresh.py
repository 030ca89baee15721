"""Host time of `zerocast.fsdp2.refresh` with 1,024 weights of 64x64 beside 8 weights of the same total size, in one process.

The elements are the same, so what the many cost beyond the few is host work a parameter: FSDP2 gives each a tensor of its own.
Beside it, on the same parameters, a step of torch's foreach AdamW. On a CPU the stages themselves are in these times. They are
processor time of one thread, the least of several calls, which other work on the machine disturbs little.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerocast
from tests.benchmarks.plan_host_time import FEW, MANY

FORMATS = ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")


def model_of(count: int, shape: tuple[int, int], fmt: str, device: str) -> nn.Module:
    """`count` prepared weights, sharded."""
    layers = (nn.Linear(shape[1], shape[0], bias=False, device=device) for _ in range(count))
    model = zerocast.fsdp2.prepare(nn.Sequential(*layers), zerocast.Recipe({"*.weight": fmt}))
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def host_milliseconds(work: Callable[[], object], repeats: int) -> float:
    """The least processor time of a call, after a warm-up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append((time.process_time() - start) * 1e3)
    return min(times)


def measure(repeats: int, device: str) -> list[dict[str, float | str]]:
    """One row a format: milliseconds of a refresh of the few and of the many, and of AdamW on the many."""
    rows: list[dict[str, float | str]] = []
    for fmt in FORMATS:
        few = host_milliseconds(partial(zerocast.fsdp2.refresh, model_of(*FEW, fmt, device)), repeats)
        model = model_of(*MANY, fmt, device)
        many = host_milliseconds(partial(zerocast.fsdp2.refresh, model), repeats)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        adamw = host_milliseconds(optimizer.step, 3)
        rows.append({"format": fmt, "few_ms": few, "many_ms": many, "ratio": many / few, "adamw_ms": adamw})
    return rows


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rows = measure(options.repeats, options.device)
    dist.destroy_process_group()
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'format':<12}{'8 weights':>12}{'1,024':>12}{'ratio':>8}{'AdamW, 1,024':>16}")
    for row in rows:
        times = f"{row['few_ms']:>9.2f} ms{row['many_ms']:>9.2f} ms{row['ratio']:>8.2f}{row['adamw_ms']:>13.2f} ms"
        print(f"{row['format']:<12}{times}")


if __name__ == "__main__":
    main()
