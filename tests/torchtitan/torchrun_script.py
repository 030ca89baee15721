"""A rank under torchrun on GPUs, without stand-ins: `-m tests.torchtitan.torchrun_script RESULT torchtitan's arguments`."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

import zerocast
from tests.torchtitan.missing_packages import without_datasets


def main(result: str, arguments: list[str]) -> None:
    """Train, and write rank 0's losses, digests of all state, differences of gathered bytes, and those that
    `zerocast.verify` finds.
    """
    with without_datasets():
        from torchtitan.config import ConfigManager
        from torchtitan.train import Trainer  # for GPUs, before our other modules import it for the CPU

        made = Trainer(ConfigManager().parse_args(arguments))
    from tests.torchtitan import checkpoints, training

    training.record_losses(made)
    made.train()
    (model,) = made.model_parts
    found = {
        "device": str(made.device),
        "losses": made.losses,
        "differences": [str(difference) for difference in zerocast.verify(model).differences],
        "complaints": training.complaints(made, "at the end"),
        "contents": checkpoints.contents(made),
    }
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    made.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
