"""Checkpoints: the optimizer's FP32 state through torch.distributed.checkpoint, one folder a step.

Masters are the truth: quantized bytes are not saved, loading casts them again. So another number of ranks can
continue a checkpoint, and another weight format can too.
"""

from pathlib import Path

import zerocast


def save(optimizer: zerocast.ZeroAdamW, out: Path, step: int) -> None:
    """Write the state after `step` steps below `out`; every rank calls this."""
    zerocast.optim.save(optimizer, out / "checkpoints" / f"step_{step:08d}")


def load_newest(optimizer: zerocast.ZeroAdamW, out: Path) -> int:
    """Read the newest checkpoint below `out` into optimizer and model; every rank calls this. Returns its step."""
    complete = sorted(path.parent for path in out.glob("checkpoints/step_*/.metadata"))  # what a save writes last
    if not complete:
        raise FileNotFoundError(f"--resume, but {out / 'checkpoints'} holds no complete checkpoint")
    zerocast.optim.load(optimizer, complete[-1])
    return int(complete[-1].name.removeprefix("step_"))
