"""torchtitan under torchrun on GPUs, without stand-ins for these: `-m tests.torchtitan.torchrun RESULT torchtitan's arguments`.

What it imports and no test uses is a stub where it is missing: `datasets`, which is large, and `tensorboard`.
"""

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

import zerocast

STUBS = {
    "datasets": {"datasets": ("Dataset", "load_dataset"), "datasets.distributed": ("split_dataset_by_node",)},
    "tensorboard": {"torch.utils.tensorboard": ("SummaryWriter",)},
}


@contextlib.contextmanager
def without_datasets() -> Iterator[None]:
    """While the context is open, what is missing can be imported: its names are stubs, taken out of
    `sys.modules` again.
    """
    missing = [
        stub
        for package, stubs in STUBS.items()
        if package not in sys.modules and importlib.util.find_spec(package) is None
        for stub in stubs.items()
    ]
    for name, attributes in missing:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(dict.fromkeys(attributes, type("NotInstalled", (), {})))
    try:
        yield
    finally:
        for name, _ in missing:
            del sys.modules[name]


def main(result: str, arguments: list[str]) -> None:
    """Train, and write rank 0's losses, digests of all state, differences of gathered bytes, and those that
    `zerocast.verify` finds.
    """
    with without_datasets():
        from torchtitan.config import ConfigManager
        from torchtitan.train import Trainer  # for GPUs, before our other modules import it for the CPU

        made = Trainer(ConfigManager().parse_args(arguments))
    from tests.torchtitan.training import complaints, contents, record_losses

    record_losses(made)
    made.train()
    (model,) = made.model_parts
    found = {
        "device": str(made.device),
        "losses": made.losses,
        "differences": [str(difference) for difference in zerocast.verify(model).differences],
        "complaints": complaints(made, "at the end"),
        "contents": contents(made),
    }
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    made.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
