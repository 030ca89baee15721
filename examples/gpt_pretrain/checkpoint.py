"""Checkpoints: the optimizer's FP32 state through torch.distributed.checkpoint, one folder a step.

Masters are the truth: quantized bytes are not saved, loading casts them again. So another number of ranks can
continue a checkpoint, another weight format can, and so can FSDP2 what ZeRO began, or the other way about.
"""

from pathlib import Path

import zerocast
from examples.gpt_pretrain.build import Optimizer


def save(optimizer: Optimizer, out: Path, step: int) -> None:
    """Write the state after `step` steps below `out`, and delete all but the last three; every rank calls this."""
    zerocast.optim.Checkpoints(out / "checkpoints").save(optimizer, step)


def load_newest(optimizer: Optimizer, out: Path) -> int:
    """Read the newest intact checkpoint below `out` into optimizer and model; every rank calls this. Returns its step."""
    return zerocast.optim.Checkpoints(out / "checkpoints").load(optimizer)
