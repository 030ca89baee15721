"""Folders of checkpoints: what tests put into them and find there."""

from pathlib import Path

from tests.optim.probe import MIXED
from tests.optim.runs import Run, Trainer
from zerocast.checkpoint.writer import LEASE
from zerocast.optim import Checkpoints

# Formats with delayed scales, with blocks and without any.
FEW = Run(tuple(spec for spec in MIXED if spec.name in ("norm", "delayed", "nv", "bias")))


def names(folder: Path) -> list[str]:
    """Return the names in a folder, without the lease of its writer."""
    return sorted(path.name for path in folder.iterdir() if path.name != LEASE)


def saved(folder: str, steps: range = range(1, 3)) -> None:
    """Save checkpoints of these steps of `FEW`."""
    trainer, checkpoints = Trainer(FEW), Checkpoints(folder)
    for step in steps:
        trainer.step(step)
        checkpoints.save(trainer.optimizer, step)
