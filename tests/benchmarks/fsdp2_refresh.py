"""Host time of `zerocast.fsdp2.refresh` with 1,024 weights of 64x64 beside 8 weights of the same total size, in one process.

The elements are the same, so what the many cost beyond the few is work a parameter: FSDP2 gives each a tensor of its own. On a CPU
the stages themselves are in these times; `host` is what is left when the time within them is taken off, the part that a GPU does
not take over. Beside it, on the same parameters, a step of torch's foreach AdamW. Times are processor time of one thread, the
least of several calls, which other work on the machine disturbs little.
"""

import argparse
import importlib
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
STAGES = ("partial_amax", "compute_scales", "partial_cast", "roll_history")


def model_of(count: int, shape: tuple[int, int], fmt: str, device: str) -> nn.Module:
    """A stack of `count` prepared weights of one shape and format, sharded."""
    layers = (nn.Linear(shape[1], shape[0], bias=False, device=device) for _ in range(count))
    model = zerocast.fsdp2.prepare(nn.Sequential(*layers), zerocast.Recipe({"*.weight": fmt}))
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


class Stages:
    """Within, adds up the processor time in the functions of the extension for the CPU, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._module = importlib.import_module("zerocast.backends._C").cpu
        self._kept = {name: getattr(self._module, name) for name in STAGES}

    def __enter__(self) -> "Stages":
        for name, function in self._kept.items():
            setattr(self._module, name, partial(self._timed, function))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._kept.items():
            setattr(self._module, name, function)

    def _timed(self, function: Callable[..., object], *args: object) -> object:
        start = time.process_time()
        result = function(*args)
        self.seconds += time.process_time() - start
        return result


def milliseconds(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(the least processor time of a call, the least outside of the CPU's stages), after a warm-up."""
    work()
    times, outside = [], []
    for _ in range(repeats):
        with Stages() as stages:
            start = time.process_time()
            work()
            times.append((time.process_time() - start) * 1e3)
        outside.append(times[-1] - stages.seconds * 1e3)
    return min(times), min(outside)


def measure(repeats: int, device: str) -> list[dict[str, float | str]]:
    """One row a format: milliseconds of a refresh of the few and of the many, and of AdamW on the many."""
    rows: list[dict[str, float | str]] = []
    for fmt in FORMATS:
        few, few_host = milliseconds(partial(zerocast.fsdp2.refresh, model_of(*FEW, fmt, device)), repeats)
        model = model_of(*MANY, fmt, device)
        many, many_host = milliseconds(partial(zerocast.fsdp2.refresh, model), repeats)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        adamw, _ = milliseconds(optimizer.step, 3)
        host = {"few_host_ms": few_host, "many_host_ms": many_host}
        rows.append({"format": fmt, "few_ms": few, "many_ms": many, **host, "adamw_ms": adamw})
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
    names = {"8 weights": "few_ms", "1,024": "many_ms", "host, 8": "few_host_ms", "host, 1,024": "many_host_ms"}
    names["AdamW, 1,024"] = "adamw_ms"
    print(f"{'format':<12}" + "".join(f"{name:>16}" for name in names))
    for row in rows:
        print(f"{row['format']:<12}" + "".join(f"{row[key]:>13.2f} ms" for key in names.values()))


if __name__ == "__main__":
    main()
