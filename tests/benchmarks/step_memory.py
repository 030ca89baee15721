"""Peak memory of training steps of a model of 100 M parameters on two ranks, beside an arithmetic prediction, term by term.

Every allocation and release is read from torch's profiler, on each rank, from before the model exists until after the last
step; the peak is that of the steps. The prediction uses shapes and formats only.
"""

import argparse
import json
import math
import socket
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import zerocast
from zerocast.formats.layout import amax_counts, buffers, round_up

WIDTH, LAYERS, RANKS, STEPS, TOKENS = 2048, 24, 2, 3, 8
BUCKET = 16 * 1024 * 1024
BF16, FP32 = 2, 4


@dataclass
class Peak:
    """Bytes of one rank: the measured peak, the predicted terms, and the largest single allocation of the last step."""

    format: str
    parameters: int
    measured: int
    largest_new: int
    terms: dict[str, int] = field(default_factory=dict)

    @property
    def predicted(self) -> int:
        return sum(self.terms.values())


def model_of(fmt: str) -> nn.Module:
    """A stack of linear layers, in bf16, with quantized weights."""
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()]
    model = nn.Sequential(*layers)
    zerocast.quantize_(model, zerocast.Recipe({"*.weight": fmt}), dtype=torch.bfloat16)
    return model


def predict(fmt: str) -> dict[str, int]:
    """Bytes a rank, from shapes alone; README.md of this folder explains each term."""
    spec, matrix, one = zerocast.get_format(fmt), (WIDTH, WIDTH), WIDTH * WIDTH
    storage = {
        name: math.prod(buffer.shape) * buffer.dtype.itemsize if buffer else 0
        for name, buffer in buffers(spec, matrix, torch.bfloat16).items()
    }
    if spec.block is None:
        storage["columnwise_scale_inv"] = 0  # the rowwise one serves both
    shard = LAYERS * one // RANKS
    bucket = round_up(max(one, BUCKET // one * one), RANKS * 128)
    return {
        "weights": LAYERS * storage["rowwise_data"],
        "scales": LAYERS * sum(storage[name] for name in ("rowwise_scale_inv", "amax", "scale", "amax_history")),
        "columnwise copies": LAYERS * (storage["columnwise_data"] + storage["columnwise_scale_inv"]),
        "packed amaxes": LAYERS * sum(amax_counts(spec, *matrix)) * BF16,
        "masters": shard * FP32,
        "moments": 2 * shard * FP32,
        "gradient shard": shard * FP32,
        "two gradient buckets": 2 * bucket * BF16,
        "their reduced parts": 2 * (bucket // RANKS) * BF16,
        "one layer dequantized, and its gradient": 2 * one * BF16,
        "activations": (2 * LAYERS + 2) * TOKENS * WIDTH * BF16,
    }


def run(rank: int, port: int, fmt: str, results: "mp.Queue[Peak]") -> None:
    """One rank: train under the profiler and report the peak."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.manual_seed(0)
        model = model_of(fmt)
        config = zerocast.ZeroConfig(bucket_size=BUCKET)
        optimizer = zerocast.ZeroAdamW(model.named_parameters(), config=config)
        for step in range(STEPS):
            with record_function(f"step {step}"):
                model(torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
    measured, largest = _peak(profiler)
    if rank == 0:
        parameters = sum(p.numel() for p in model.parameters())
        results.put(Peak(fmt, parameters, measured, largest, predict(fmt)))
    dist.destroy_process_group()


def _peak(profiler: profile) -> tuple[int, int]:
    """Peak bytes over all steps, and the largest allocation of the last one."""
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    starts = {event.name(): event.start_ns() for event in events if event.name().startswith("step ")}
    first, last = starts["step 0"], starts[f"step {STEPS - 1}"]
    allocated = peak = largest = 0
    for event in events:
        if event.name() == "[memory]":
            allocated += event.nbytes()
            if event.start_ns() >= first:
                peak = max(peak, allocated)
            if event.start_ns() >= last:
                largest = max(largest, event.nbytes())
    return peak, largest


def measure(fmt: str) -> Peak:
    """Train on `RANKS` processes; rank 0's peak."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results: mp.Queue[Peak] = mp.get_context("spawn").Queue()
    workers = mp.spawn(run, (port, fmt, results), nprocs=RANKS, join=False)
    peak = results.get(timeout=600)
    workers.join()
    return peak


def main() -> None:
    """Print the terms and the sums, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", nargs="+", default=["nvfp4", "fp8_block"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    peaks = [measure(fmt) for fmt in options.format]
    if options.json:
        print(json.dumps([asdict(peak) for peak in peaks], indent=2))
        return
    for peak in peaks:
        print(f"\n{peak.format}, {peak.parameters / 1e6:.1f} M parameters, {RANKS} ranks, MB a rank")
        for name, size in peak.terms.items():
            print(f"  {name:<42}{size / 1e6:>9.1f}")
        off = peak.measured / peak.predicted - 1
        print(f"  {'predicted':<42}{peak.predicted / 1e6:>9.1f}")
        print(f"  {'measured peak':<42}{peak.measured / 1e6:>9.1f}  ({off:+.1%})")
        print(f"  {'largest allocation of the last step':<42}{peak.largest_new / 1e6:>9.1f}")


if __name__ == "__main__":
    main()
