"""A step of the GPT example under FSDP2 in several formats, which take turns: what slows the machine for a while slows all.

    torchrun --nproc-per-node 2 -m tests.benchmarks.fsdp2_step --width 2048

The time of a step is that of the slowest rank, with everything on the device done. The smallest and the median of all rounds.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist

from examples.gpt_pretrain.build import Optimizer, build_model, build_optimizer
from examples.gpt_pretrain.config import TrainConfig
from examples.gpt_pretrain.data import Batch, Corpus
from examples.gpt_pretrain.measure import count_parameters
from examples.gpt_pretrain.model import GPT, GPTConfig
from examples.gpt_pretrain.phases import take_step
from examples.gpt_pretrain.world import World

FORMATS = ("bf16", "fp8_current", "fp8_block", "mxfp8", "nvfp4")


def seconds_of_step(work: tuple[GPT, Optimizer, Batch], world: World) -> float:
    """Of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    take_step(*work)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    taken = torch.tensor(time.perf_counter() - start, device=world.device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def measure(options: argparse.Namespace, world: World) -> dict[str, list[float]]:
    """Milliseconds of every round by format."""
    shape = GPTConfig(options.layers, options.heads, options.width, options.context)
    batch = Corpus.load((), options.context).train_batch(
        options.batch_size, seed=0, step=0, micro_step=0, rank=world.rank
    )
    work = {}
    for name in options.formats:
        config = TrainConfig(format=name, parallel="fsdp2", model=shape, batch_size=options.batch_size)
        model = build_model(config, world.device)
        work[name] = model, build_optimizer(model, config), batch.to(world.device)
        if world.rank == 0 and name == options.formats[0]:
            print(f"{count_parameters(model) / 1e6:.1f} M parameters, {world.size} ranks", flush=True)
    rounds = [
        {name: seconds_of_step(one, world) * 1e3 for name, one in work.items()} for _ in range(options.rounds + 3)
    ]
    return {name: [times[name] for times in rounds[3:]] for name in work}


def main() -> None:
    """Print the table, or JSON, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bf16", "fp8_current", "fp8_block", "nvfp4"])
    for name, value in (("layers", 16), ("heads", 16), ("width", 1024), ("context", 1024), ("batch-size", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    world = World.join(options.device)
    found = measure(options, world)
    if world.rank == 0 and options.json:
        print(json.dumps(found))
    elif world.rank == 0:
        tokens = options.batch_size * options.context * world.size
        print(f"{'format':<12}{'smallest':>12}{'median':>12}{'tokens/s':>14}")
        for name, times in found.items():
            middle = statistics.median(times)
            print(f"{name:<12}{min(times):>9.1f} ms{middle:>9.1f} ms{tokens / middle * 1e3:>14,.0f}")
    world.leave()


if __name__ == "__main__":
    main()
