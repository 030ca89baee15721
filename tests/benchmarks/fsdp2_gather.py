"""What FSDP2 gathers of a stack of transformer blocks, how long that takes, and a refresh beside the time that memory needs for it.

    torchrun --nproc-per-node 2 -m tests.benchmarks.fsdp2_gather [--device cuda]

bf16 is FSDP2 alone. Where torchao is installed its FP8 all-gather is a row too (ran with 0.16.0), with
`precompute_float8_dynamic_scale_for_fsdp` as the refresh, which finds scales and leaves the cast to each gather. It sends FP8,
which gloo does not take: on several ranks it needs GPUs. A step of training is timed by
`zerocast bench step`.
"""

import argparse
import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerocast
from tests.benchmarks.plan_host_time import milliseconds
from tests.fsdp2.traffic import Traffic

FORMATS = ("fp8_current", "fp8_block", "mxfp8", "nvfp4")
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@dataclass(frozen=True)
class Row:
    """Of one way to gather: megabytes of all ranks together, milliseconds of this rank, and the refresh over its floor."""

    name: str
    gathered_mb: float
    gather_ms: float
    refresh_ms: float
    floor_ms: float


class Block(nn.Module):
    """The matrices of a transformer block."""

    def __init__(self, width: int, device: str) -> None:
        super().__init__()
        shapes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
        self.layers = nn.ModuleList(nn.Linear(k, m, bias=False, device=device) for m, k in shapes)

    def forward(self) -> None:
        """Only gathered, never computed with."""


class Stack(nn.Module):
    def __init__(self, count: int, width: int, device: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, device) for _ in range(count))

    def forward(self) -> None:
        """Only gathered, never computed with."""


def prepared(fmt: str, model: Stack) -> Callable[[], object]:
    """Before sharding; returns the refresh."""
    zerocast.fsdp2.prepare(model, zerocast.Recipe({"*.weight": fmt}))
    return partial(zerocast.fsdp2.refresh, model)


def torchao(model: Stack) -> Callable[[], object]:
    """Tensorwise FP8, scales found by one all-reduce."""
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    return partial(precompute_float8_dynamic_scale_for_fsdp, model)


def ways(device: str) -> dict[str, Callable[[Stack], Callable[[], object]]]:
    """What is done to a model before it is sharded, by the name of its row."""
    found: dict[str, Callable[[Stack], Callable[[], object]]] = {"bf16": lambda model: lambda: None}
    found |= {fmt: partial(prepared, fmt) for fmt in FORMATS}
    if importlib.util.find_spec("torchao") and (device == "cuda" or dist.get_world_size() == 1):
        found["torchao fp8"] = torchao
    return found


def synchronized(work: Callable[[], object], device: str) -> None:
    """Do the work, and wait until the device has done it."""
    work()
    if device == "cuda":
        torch.cuda.synchronize()


def copy_rate(device: str) -> float:
    """Bytes a millisecond that a copy reads and writes."""
    source = torch.empty(2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: synchronized(lambda: target.copy_(source), device), 10)


def measure(name: str, way: Callable[[Stack], Callable[[], object]], options: argparse.Namespace, rate: float) -> Row:
    """One row of the table: the times of a way to refresh and gather a stack."""
    model: Any = Stack(options.blocks, options.width, options.device)
    refresh = way(model)
    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY, reshard_after_forward=True)

    def gather() -> None:
        for block in model.blocks:
            block.unshard()
            block.reshard()

    refresh()
    gather()
    with Traffic() as seen:
        gather()
    sent = sum(seen.sent["all-gather"])
    elements = sum(p.to_local().numel() for p in model.parameters())
    moved = 0 if name == "bf16" else elements * (4 + 4) + sent  # masters for the amaxes, masters for the codes, codes
    refresh_ms = milliseconds(lambda: synchronized(refresh, options.device), options.repeats)
    gather_ms = milliseconds(lambda: synchronized(gather, options.device), options.repeats)
    return Row(name, sent * dist.get_world_size() / 1e6, gather_ms, refresh_ms, moved / rate)


def main() -> None:
    """Print the table, or JSON, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    if options.device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    rate = copy_rate(options.device)
    rows = [measure(name, way, options, rate) for name, way in ways(options.device).items()]
    if dist.get_rank() == 0 and options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    elif dist.get_rank() == 0:
        print(f"{'':<22}{'gathered':>12}{'all-gather':>14}{'refresh':>12}{'floor':>12}{'ratio':>8}")
        for row in rows:
            ratio = f"{row.refresh_ms / row.floor_ms:8.2f}" if row.floor_ms else ""
            times = f"{row.gather_ms:>11.2f} ms{row.refresh_ms:>9.2f} ms{row.floor_ms:>9.2f} ms"
            print(f"{row.name:<22}{row.gathered_mb:>9.1f} MB{times}{ratio}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
