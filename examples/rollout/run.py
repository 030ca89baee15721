"""A policy-gradient toy whose rollouts are made by another process with the trainer's own bits.

    python -m examples.rollout.run --format nvfp4

Two processes on the CPU: a trainer, and a generator that is refitted before every step. First with
the trainer's bytes, by what changed since the step before; then, as a control, with bf16 weights
that the generator quantizes again by itself.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro

from examples.rollout import generator, trainer
from examples.rollout.config import RolloutConfig


def run(config: RolloutConfig) -> list[trainer.Step]:
    """The steps of one run, whose two processes are this one and a child."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()
        child = mp.get_context("spawn").Process(target=_generate, args=(config, store), daemon=True)
        child.start()
        try:
            _join(0, store)
            return trainer.run(config)
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
    """A line for the first and every tenth step."""
    print(f"\n{name}\n{'step':>5} {'reward':>7} {'KL, same pass':>14} {'KL, decoding':>13} {'refit, of full':>15}")
    for number, step in enumerate(steps):
        if number % 10 == 0 or number == len(steps) - 1:
            share = step.nbytes / step.full_nbytes
            print(f"{number:5d} {step.reward:7.3f} {step.kl:14.2e} {step.kl_decoding:13.2e} {share:15.2%}")


def main(config: RolloutConfig) -> None:
    """Both runs, or the control alone."""
    if not config.requantize:
        steps = run(config)
        show(f"the trainer's own {config.format} bytes", steps)
        if not all(step.is_equal for step in steps):
            sys.exit("the generator's logits are not the trainer's")
    show("bf16 weights, quantized again by the generator", run(replace(config, requantize=True)))


if __name__ == "__main__":
    main(tyro.cli(RolloutConfig, description=__doc__))
