"""Primary weights: the parameters in Megatron's byte buffers, QuantizedWeights or tensors of TransformerEngine, seen alike."""

from typing import Any

from zerocast import QuantizedWeight

from . import te_tensors


def is_primary(param: Any) -> bool:
    """Whether the bytes of a parameter are what Megatron gathers."""
    return isinstance(param, QuantizedWeight) or te_tensors.is_te_tensor(param)


def weight_of(param: Any) -> QuantizedWeight:
    """The QuantizedWeight over the bytes of a primary weight: itself, or a twin. TypeError or ValueError for what is not cast."""
    return param if isinstance(param, QuantizedWeight) else te_tensors.weight_of(param)
