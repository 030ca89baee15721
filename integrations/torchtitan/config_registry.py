"""A config registry with quantized versions of torchtitan's own configurations.

They have the same names: `--module zerocast.integrations.torchtitan --config llama3_8b
--zerocast.recipe ...`.
"""

from collections.abc import Callable
from typing import Any

from . import host
from .trainer import quantized


def __getattr__(name: str) -> Callable[[], Any]:
    """Return a function that returns torchtitan's configuration `name`, quantized by the command
    line's recipe. Raises AttributeError if no registry of torchtitan has that name.
    """
    function = None if name.startswith("_") else host.find_configuration(name)
    if function is None:
        raise AttributeError(f"no config registry of torchtitan has {name!r}")
    return lambda: quantized(function())
