"""Checkpoints: the optimizer's FP32 state through torch.distributed.checkpoint, one folder per
step.

Only masters are saved; loading casts them again. So a run can continue with a different number of
ranks or weight format, and FSDP2 can continue a ZeRO run, or the reverse.
"""

from pathlib import Path

from torch import nn

import zerocast
from examples.gpt_pretrain.build import Optimizer


def save(optimizer: Optimizer, model: nn.Module, out: Path, step: int) -> None:
    """Write the state after `step` steps below `out`, and delete all but the last three; every
    rank calls this.
    """
    zerocast.optim.Checkpoints(out / "checkpoints").save(optimizer, step, model=model)


def load_newest(optimizer: Optimizer, model: nn.Module, out: Path) -> int:
    """Read the last intact checkpoint below `out` into optimizer and model; every rank calls
    this. Returns its step.
    """
    return zerocast.optim.Checkpoints(out / "checkpoints").load(optimizer, model=model)
