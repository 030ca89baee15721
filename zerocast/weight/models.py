"""A registry of the models that hold quantized weights.

An optimizer is given parameters only. Through this registry it finds their model, and with it the
parameters and buffers that the optimizer was not given.
"""

import weakref
from collections.abc import Iterable

from torch import Tensor, nn

# The models in the order in which they were quantized. Ranks quantize in the same order, so a walk
# over this dict visits models in the same order on all ranks.
_models: "weakref.WeakKeyDictionary[nn.Module, None]" = weakref.WeakKeyDictionary()


def remember(model: nn.Module) -> None:
    """Remember a model as long as it exists."""
    _models[model] = None


def models_of(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """The remembered models that have any of these parameters."""
    given = set(map(id, parameters))
    return [model for model in list(_models) if any(id(parameter) in given for parameter in model.parameters())]
