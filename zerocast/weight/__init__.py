"""A weight in low precision: what it looks like to torch, its storage, how old its copies are,
and its products.
"""

from zerocast.weight import compiled_ops as _compiled_ops  # noqa: F401 - the products, for graphs
from zerocast.weight import tensor_ops as _tensor_ops  # noqa: F401 - torch's operators learn what to do with a weight
from zerocast.weight.weight import QuantizedWeight, _restore

_restore.__module__ = __name__  # files that were saved name it here

__all__ = ["QuantizedWeight"]
