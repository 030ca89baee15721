"""Stubs of packages that torchtitan imports and no test uses: `datasets`, which is large, and `tensorboard`."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

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
