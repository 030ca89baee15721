"""Folders of checkpoints: what tests put into them and find there."""

from pathlib import Path

from tests.optim.runs import Run, Trainer
from zerocast.checkpoint.writer import LEASE
from zerocast.optim import Checkpoints


def names(folder: Path) -> list[str]:
    """What is in a folder, beside the lease of its writer."""
    return sorted(path.name for path in folder.iterdir() if path.name != LEASE)


def saved(folder: str, steps: range = range(1, 3)) -> None:
    trainer, checkpoints = Trainer(Run()), Checkpoints(folder)
    for step in steps:
        trainer.step(step)
        checkpoints.save(trainer.optimizer, step)
