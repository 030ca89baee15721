"""Training that can be killed at any moment: it goes on from its checkpoints, in processes of its own, and leaves a hash."""

import hashlib
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.optim.probe import MIXED
from tests.optim.runs import Run, Trainer, snapshot
from tests.workers import join
from zerocast.optim import Checkpoints

COLLECTIVE_SECONDS = 10


def train(rank: int, world: int, folder: str, store: str, steps: int, asynchronous: bool) -> None:
    """To the end, a checkpoint a step; the hash of all that a rank holds goes to `end_<rank>`."""
    if world > 1:
        join(rank, world, "gloo", store, timedelta(seconds=COLLECTIVE_SECONDS))
    checkpoints = Checkpoints(Path(folder, "checkpoints"), keep=2, asynchronous=asynchronous)
    trainer = Trainer(Run(MIXED, steps=steps))
    first = checkpoints.load(trainer.optimizer) if checkpoints.steps() else 0
    for step in range(first, steps):
        trainer.step(step)
        checkpoints.save(trainer.optimizer, step + 1)
    checkpoints.wait()
    digest = hashlib.sha256()
    for name, value in sorted(snapshot(trainer).items()):
        digest.update(name.encode() + value.tobytes())
    Path(folder, f"end_{rank}").write_text(digest.hexdigest())
    if world > 1:
        dist.destroy_process_group()
