"""A policy-gradient toy whose rollouts are made by another process with the trainer's own bits.

    python -m examples.rollout.run --format nvfp4

On the CPU: a trainer, and a generator that is refitted before every step. First with the trainer's
bytes, as changes since the previous step; then, as a control, with bf16 weights that are quantized
again by a different rule. vLLM generates where `make vllm` has built its environment, else a model
of transformers.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from matplotlib.figure import Figure

from examples.rollout import engine, generator, trainer
from examples.rollout.config import RolloutConfig


def run(config: RolloutConfig) -> list[trainer.Step]:
    """Return the steps of one run, whose generator is a second process."""
    with tempfile.TemporaryDirectory() as folder:
        if config.vllm.is_file():
            return trainer.run(config, partial(engine.Engine, folder=Path(folder)))
        store = Path(folder, "store").as_uri()
        child = mp.get_context("spawn").Process(target=_generate, args=(config, store), daemon=True)
        child.start()
        try:
            _join(generator.TRAINER, store)
            # the generator has no masters
            alone = dist.new_group([generator.TRAINER], use_local_synchronization=True)
            return trainer.run(config, generator.Peer, alone)
        finally:
            dist.destroy_process_group()
            child.join(60)


def _generate(config: RolloutConfig, store: str) -> None:
    _join(generator.GENERATOR, store)
    generator.run(config)
    dist.destroy_process_group()


def _join(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)


def show(name: str, steps: Sequence[trainer.Step]) -> None:
    """Print a line for the first and every tenth step."""
    heads = ["step", "reward", *(f"KL, {each}" for each in steps[0].kl), "most of |dlog p|", "refit, of full"]
    print(f"\n{name}\n{'  '.join(heads)}")
    for number, step in enumerate(steps):
        if number % 10 == 0 or number == len(steps) - 1:
            share = f"{step.nbytes / step.full_nbytes:.2%}"
            cells = [
                str(number),
                f"{step.reward:.3f}",
                *(f"{kl:.2e}" for kl in step.kl.values()),
                f"{step.gap:.2e}",
                share,
            ]
            print("  ".join(cell.rjust(len(head)) for cell, head in zip(cells, heads, strict=True)))


def plot(runs: dict[str, list[trainer.Step]], path: Path) -> None:
    """Draw rewards and KL, of the first pass, by step."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    rewards, divergences = figure.subplots(1, 2)
    for name, steps in runs.items():
        rewards.plot([step.reward for step in steps], label=name)
        divergences.plot([next(iter(step.kl.values())) for step in steps], label=name)
    rewards.set(xlabel="step", ylabel="reward")
    divergences.set(xlabel="step", ylabel="KL from the trainer, nats", ylim=0)
    rewards.legend()
    figure.savefig(path, dpi=110)


def main(config: RolloutConfig) -> None:
    """Run both runs, or only the control."""
    has_vllm = config.vllm.is_file()
    print("vLLM generates" if has_vllm else f"transformers generate, since there is no {config.vllm} (make vllm)")
    names = {False: f"the trainer's own {config.format} bytes", True: "bf16 weights, quantized again"}
    runs: dict[str, list[trainer.Step]] = {}
    for requantize in [True] if config.requantize else [False, True]:
        steps = runs[names[requantize]] = run(replace(config, requantize=requantize))
        show(names[requantize], steps)
        if not (requantize or has_vllm or all(step.is_equal for step in steps)):
            sys.exit("the generator's logits are not the trainer's")
    if config.plot is not None:
        plot(runs, config.plot)


if __name__ == "__main__":
    main(tyro.cli(RolloutConfig, description=__doc__))
