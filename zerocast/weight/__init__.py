"""QuantizedWeight, the tensor subclass for a weight in low precision: its behaviour under torch,
its storage, the validity of its bytes, and its products.
"""

# Imported for its side effect: it registers the handlers that `__torch_dispatch__` calls.
from zerocast.weight import tensor_ops as _tensor_ops  # noqa: F401
from zerocast.weight.weight import QuantizedWeight, _restore

# A pickle stores this function by its module and name, and torch.load(weights_only=True) compares
# both with its list of safe globals. The package's name stays when the module moves.
_restore.__module__ = __name__

__all__ = ["QuantizedWeight"]
