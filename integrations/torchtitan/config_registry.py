"""torchtitan's own configurations, quantized, by their own names: `--module
zerocast.integrations.torchtitan --config llama3_8b --zerocast.recipe ...`.
"""

from collections.abc import Callable
from typing import Any

from . import host
from .trainer import quantized


def __getattr__(name: str) -> Callable[[], Any]:
    """The function of one of torchtitan's config registries, quantized by the recipe that the
    command line gives; AttributeError where none has it.
    """
    function = None if name.startswith("_") else host.find_configuration(name)
    if function is None:
        raise AttributeError(f"no config registry of torchtitan has {name!r}")
    return lambda: quantized(function())
