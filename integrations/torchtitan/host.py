"""The names of torchtitan that this integration uses. No other file here imports torchtitan.

Two interfaces are known, and each is detected by the presence of its names, never by a version
number. Up to 0.2 a model is a TrainSpec, and a JobConfig lists model converters. From 0.3 on a
model is a ModelSpec, and functions in Python make the Trainer's configuration.
"""

import importlib
import importlib.util
from typing import Any


def import_name(module: str, name: str) -> Any:
    """Return `name` of torchtitan's `module`.

    Raises ImportError with the reason if torchtitan is not installed or cannot be imported with
    this torch; RuntimeError with the missing name if its API is not supported.
    """
    titan_module = _module(module)
    if not hasattr(titan_module, name):
        raise RuntimeError(
            f"torchtitan has no {name} in torchtitan.{module}: zerocast does not support its API (supported: 0.2.2 and "
            "0.3.0; integrations/torchtitan/README.md lists the tested versions)"
        )
    return getattr(titan_module, name)


def _module(name: str) -> Any:
    """Return a module of torchtitan, or None if it has none of that name. Raises ImportError as in
    `import_name`.
    """
    if importlib.util.find_spec("torchtitan") is None:
        raise ImportError(
            "torchtitan is not installed: integrations/torchtitan/README.md says which version runs with which torch"
        )
    try:
        return importlib.import_module(f"torchtitan.{name}")
    except ModuleNotFoundError as error:
        if error.name == f"torchtitan.{name}":
            return None
        raise ImportError(f"torchtitan is installed and needs {error.name}, which is not installed") from error
    except ImportError as error:
        raise ImportError(
            f"torchtitan.{name} is installed and cannot be imported: {error}. Each torchtitan needs certain versions of torch: "
            "integrations/torchtitan/README.md says which run together"
        ) from error


def find_configuration(name: str) -> Any:
    """Return the function `name` of torchtitan's own config registries, or None. Registries that
    cannot be imported are left out, as in torchtitan. Raises ImportError if `name` begins with the
    name of a model whose registry cannot be imported.
    """
    for model in sorted(
        import_name("models", "_supported_models"), key=lambda model: (not name.startswith(model), model)
    ):
        try:
            registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
        except ImportError:
            if name.startswith(model):
                raise
            continue
        if callable(function := getattr(registry, name, None)):
            return function
    return None


HAS_MODEL_SPECS = _module("protocols.model_spec") is not None
OptimizersContainer = import_name("components.optimizer", "OptimizersContainer")
if HAS_MODEL_SPECS:
    Trainer = import_name("trainer", "Trainer")
    derive = import_name("config.override", "derive")
    has_quantization = import_name("components.quantization.utils", "has_quantization")
else:
    QuantizationConverter = import_name("components.quantization", "QuantizationConverter")
    register_model_converter = import_name("protocols.model_converter", "register_model_converter")
    build_optimizers = import_name("components.optimizer", "build_optimizers")
    get_train_spec = import_name("protocols.train_spec", "get_train_spec")
    register_train_spec = import_name("protocols.train_spec", "register_train_spec")
