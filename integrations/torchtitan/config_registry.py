"""torchtitan's own configurations, quantized, by their own names: `--module
zerocast.integrations.torchtitan --config llama3_8b --zerocast.recipe ...`.
"""

import importlib
from collections.abc import Callable
from typing import Any

from . import host
from .trainer import quantized


def __getattr__(name: str) -> Callable[[], Any]:
    """The function of one of torchtitan's config registries, quantized by the recipe that the
    command line gives; AttributeError where none has it.
    """
    if not name.startswith("_"):
        for registry in host.registries(name):
            function = getattr(importlib.import_module(registry), name, None)
            if callable(function):
                return lambda: quantized(function())
    raise AttributeError(f"no config registry of torchtitan has {name!r}")
