"""What `zerocast.metrics` costs in the GPT example: steps with it and without, in turns, so that both see the same machine.

    torchrun --nproc-per-node 2 -m tests.benchmarks.metrics_cost --format nvfp4

Three kinds of step follow each other: without a meter, with one that does not measure this step, with one that does. The cost of a
meter is what its steps take more, spread over the steps from one measurement to the next.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from examples.gpt_pretrain.build import build_model, build_optimizer
from examples.gpt_pretrain.config import TrainConfig
from examples.gpt_pretrain.data import Corpus
from examples.gpt_pretrain.train import train_step
from examples.gpt_pretrain.world import World
from zerocast.metrics import NOT_MEASURED, Measurement, Meter

NEVER = 1 << 60


def measure(config: TrainConfig, world: World, rounds: int) -> dict[str, float]:
    """Median seconds of each kind of step, as this rank sees them."""
    corpus = Corpus.load((), config.model.context)
    model = build_model(config, world.device)
    optimizer = build_optimizer(model, config)
    resting, measuring = Meter(optimizer, NEVER), Meter(optimizer, 1)
    kinds: dict[str, Callable[[], AbstractContextManager[Measurement]]] = {
        "without": lambda: nullcontext(NOT_MEASURED),
        "resting": resting.step,
        "measuring": measuring.step,
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for step in range(rounds + 2):
        for kind, make in kinds.items():
            batch = corpus.train_batch(config.batch_size, seed=0, step=step, micro_step=0, rank=world.rank)
            began = time.perf_counter()
            with make() as measured:
                loss, _ = train_step(
                    model, optimizer, [batch.to(world.device)], lr=1e-3, grad_clip=1.0, measured=measured
                )
            world.sum(loss).item()  # waits for the device and the other ranks
            if step >= 2:
                seconds[kind].append(time.perf_counter() - began)
    return {kind: statistics.median(values) for kind, values in seconds.items()}


def main() -> None:
    """Rank 0 prints milliseconds a step and the cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each kind")
    parser.add_argument("--every", type=int, default=50, help="steps from one measurement to the next")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    world = World.join("auto")
    try:
        found = measure(TrainConfig(format=chosen.format), world, chosen.rounds)
    finally:
        world.leave()
    plain = found["without"]
    more = (found["measuring"] - plain + (chosen.every - 1) * (found["resting"] - plain)) / chosen.every
    result = {
        **{f"{kind}_ms": 1e3 * value for kind, value in found.items()},
        "every": chosen.every,
        "sample_ms": 1e3 * (found["measuring"] - plain),
        "sampling_percent": 100 * (found["measuring"] - plain) / (chosen.every * plain),
        "cost_percent": 100 * more / plain,
    }
    if world.rank == 0:
        print(
            json.dumps(result)
            if chosen.json
            else "\n".join(f"{name:>17} {value:8.3f}" for name, value in result.items())
        )


if __name__ == "__main__":
    main()
