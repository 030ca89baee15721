"""The names of torchtitan that this integration is built on; nothing else here knows where they
are.

Two shapes of it are known, each detected by being there, never by version. Up to 0.2 a model is a
TrainSpec, and a JobConfig lists model converters. From 0.3 on a model is a ModelSpec, and functions
in Python make the Trainer's configuration.
"""

import importlib
import importlib.util
from typing import Any


def seam(module: str, name: str) -> Any:
    """`name` of torchtitan's `module`.

    ImportError if torchtitan is not installed or cannot be imported with this torch, with the
    reason; RuntimeError that names what is missing if it has another shape.
    """
    found = _module(module)
    if not hasattr(found, name):
        raise RuntimeError(
            f"torchtitan has no {name} in torchtitan.{module}: it has another shape than those that zerocast knows, of 0.2.2 and "
            "0.3.0. integrations/torchtitan/README.md says what was tried"
        )
    return getattr(found, name)


def _module(name: str) -> Any:
    """torchtitan's module, or None where it has none of that name; ImportError as `seam`."""
    if importlib.util.find_spec("torchtitan") is None:
        raise ImportError(
            "torchtitan is not installed: integrations/torchtitan/README.md says which version runs with which torch"
        )
    try:
        return importlib.import_module(f"torchtitan.{name}")
    except ModuleNotFoundError as error:
        if error.name == f"torchtitan.{name}":
            return None
        raise ImportError(f"torchtitan is there and needs {error.name}, which is not installed") from error
    except ImportError as error:
        raise ImportError(
            f"torchtitan.{name} is there and cannot be imported: {error}. Each torchtitan is made for some torch: "
            "integrations/torchtitan/README.md says which run together"
        ) from error


def registries(first: str) -> list[str]:
    """The modules of torchtitan's own config registries, those of models whose name begins
    `first` before the others.
    """
    models: list[str] = sorted(
        seam("models", "_supported_models"), key=lambda model: (not first.startswith(model), model)
    )
    return [f"torchtitan.models.{model}.config_registry" for model in models]


HAS_MODEL_SPECS = _module("protocols.model_spec") is not None
OptimizersContainer = seam("components.optimizer", "OptimizersContainer")
if HAS_MODEL_SPECS:
    Trainer = seam("trainer", "Trainer")
    derive = seam("config.override", "derive")
    has_quantization = seam("components.quantization.utils", "has_quantization")
else:
    QuantizationConverter = seam("components.quantization", "QuantizationConverter")
    register_model_converter = seam("protocols.model_converter", "register_model_converter")
    build_optimizers = seam("components.optimizer", "build_optimizers")
    get_train_spec = seam("protocols.train_spec", "get_train_spec")
    register_train_spec = seam("protocols.train_spec", "register_train_spec")
