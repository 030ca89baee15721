"""The parameters of a model that transformers builds from a config, on the meta device."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from zerocast.footprint.model_files import ROOT, Model, Parameter
from zerocast.quantize import NO_PRODUCT
from zerocast.serve.stored_model import class_of, config_of, on_meta

# The most layers that are built, so that a typing error is reported.
MAX_LAYERS = 10_000
# The names of modules whose weights choose experts. These stay in the dtype of the model.
ROUTERS = ("gate", "router", "shared_expert_gate")
NEXT_LAYERS = "num_nextn_predict_layers"


def read_config(path: Path) -> Model:
    """Read a config.json. Raises ModuleNotFoundError without transformers, and transformers' errors
    for a config that it cannot build.
    """
    try:
        config = config_of(path)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{path} is built by transformers: pip install 'zerocast[hf]'") from error
    return build(config)


def build(config: Any) -> Model:
    """Build the model of a PreTrainedConfig."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0) or 0
    if layers > MAX_LAYERS:
        raise ValueError(f"it has {layers:,} layers, and {MAX_LAYERS:,} are the most that are built")
    model = on_meta(config, class_of(config))
    unbuilt = getattr(config, NEXT_LAYERS, 0)
    not_counted = f"the layer for multi-token prediction ({NEXT_LAYERS})" if unbuilt else ""
    return Model(list(parameters_of(model)), not_counted)


def parameters_of(model: nn.Module) -> Iterator[Parameter]:
    """Yield the parameters of a model. Blocks are the elements of its outermost module lists."""
    units: dict[str, int] = {}
    for name, _ in model.named_parameters():
        owner_name, _, attribute = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        block = _block_of(model, owner_name)
        unit = ROOT if block is None else units.setdefault(block, len(units))
        parameter = getattr(owner, attribute)
        linear = unit != ROOT and _is_in_products(owner, attribute) and not _is_router(model, owner_name)
        yield Parameter(name, tuple(parameter.shape), linear, unit)


def _block_of(model: nn.Module, name: str) -> str | None:
    """Return the name of the outermost element of a module list that a module is in."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:depth])), nn.ModuleList | nn.ModuleDict):
            return ".".join(parts[: depth + 1])
    return None


def _is_in_products(owner: nn.Module, attribute: str) -> bool:
    """Return True for the weight of a linear layer, and for a parameter that has a matrix per
    expert.
    """
    if isinstance(owner, tuple(NO_PRODUCT)):
        return False
    # GPT-2's linear layer is a class of transformers.
    is_linear = isinstance(owner, nn.Linear) or type(owner).__name__ == "Conv1D"
    return (attribute == "weight" and is_linear) or getattr(owner, attribute).dim() > 2


def _is_router(model: nn.Module, owner_name: str) -> bool:
    parent, _, name = owner_name.rpartition(".")
    return name in ROUTERS and hasattr(model.get_submodule(parent), "experts")
