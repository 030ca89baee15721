"""The names of torchtitan that this integration is built on; nothing else here knows where they
are.

Detected by being there, never by version: torchtitan 0.3 has other ones.
"""

import importlib
import importlib.util
from typing import Any


def seam(module: str, name: str) -> Any:
    """`name` of torchtitan's `module`.

    ImportError if torchtitan is not installed or cannot be imported with this torch, with the
    reason; RuntimeError that names what is missing if it has another shape.
    """
    if importlib.util.find_spec("torchtitan") is None:
        raise ImportError(
            "torchtitan is not installed: integrations/torchtitan/README.md says which version runs with which torch"
        )
    try:
        found = importlib.import_module(f"torchtitan.{module}")
    except ModuleNotFoundError as error:
        if error.name != f"torchtitan.{module}":
            raise ImportError(f"torchtitan is there and needs {error.name}, which is not installed") from error
        raise _other_shape(module, name) from error
    except ImportError as error:
        raise ImportError(
            f"torchtitan.{module} is there and cannot be imported: {error}. Each torchtitan is made for some torch: "
            "integrations/torchtitan/README.md says which run together"
        ) from error
    if not hasattr(found, name):
        raise _other_shape(module, name)
    return getattr(found, name)


def _other_shape(module: str, name: str) -> RuntimeError:
    return RuntimeError(
        f"torchtitan has no {name} in torchtitan.{module}: it has another shape than the one that zerocast knows, of 0.2.2. "
        "integrations/torchtitan/README.md has the lines for 0.3"
    )


QuantizationConverter = seam("components.quantization", "QuantizationConverter")
register_model_converter = seam("protocols.model_converter", "register_model_converter")
OptimizersContainer = seam("components.optimizer", "OptimizersContainer")
build_optimizers = seam("components.optimizer", "build_optimizers")
get_train_spec = seam("protocols.train_spec", "get_train_spec")
register_train_spec = seam("protocols.train_spec", "register_train_spec")
