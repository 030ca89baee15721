"""The models that hold quantized weights: an optimizer is given parameters alone, and finds by
these what else its model computes with.
"""

import weakref
from collections.abc import Iterable

from torch import Tensor, nn

# in the order in which they were quantized, alike on all ranks
_models: "weakref.WeakKeyDictionary[nn.Module, None]" = weakref.WeakKeyDictionary()


def remember(model: nn.Module) -> None:
    """Remember a model as long as it exists."""
    _models[model] = None


def models_of(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """The remembered models that have any of these parameters."""
    given = set(map(id, parameters))
    return [model for model in list(_models) if any(id(parameter) in given for parameter in model.parameters())]
