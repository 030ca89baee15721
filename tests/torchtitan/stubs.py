"""torchtitan's text data sets need the package `datasets`, which is large and of which nothing is used here."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

STUBS = {"datasets": ("Dataset", "load_dataset"), "datasets.distributed": ("split_dataset_by_node",)}


@contextlib.contextmanager
def without_datasets() -> Iterator[None]:
    """Where `datasets` is missing, its names are stubs within, taken out of `sys.modules` again."""
    is_there = "datasets" in sys.modules or importlib.util.find_spec("datasets")
    missing = {} if is_there else STUBS
    for name, attributes in missing.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(dict.fromkeys(attributes, type("NotInstalled", (), {})))
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
