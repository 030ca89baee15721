"""The Triton backend: the stages as Triton kernels, for GPUs where the extension has no CUDA build.

With TRITON_INTERPRET=1, set before this package is imported, the kernels run in Triton's
interpreter on CPU tensors; this serves tests and is never chosen automatically. README.md describes
the differences.
"""

try:
    import triton
except ImportError as error:
    raise ImportError(
        f"Triton cannot be imported ({error}): install it with `pip install 'zerocast[triton]'`"
    ) from error

from zerocast.backends.triton.adam_8bit import adam_8bit
from zerocast.backends.triton.adam_amax import adam_amax
from zerocast.backends.triton.compute_scales import compute_scales, roll_history
from zerocast.backends.triton.dequantize import dequantize
from zerocast.backends.triton.gradient_messages import add_gradients, quantize_gradient
from zerocast.backends.triton.partial_amax import partial_amax
from zerocast.backends.triton.partial_cast import partial_cast
from zerocast.backends.triton.transpose import transpose
from zerocast.backends.triton.upcast import upcast

INTERPRETED = bool(triton.knobs.runtime.interpret)
# The interpreter dereferences host addresses.
DEVICES = ("cpu",) if INTERPRETED else ("cuda",)
PREFERENCE = -1 if INTERPRETED else 1

__all__ = [
    "adam_8bit",
    "adam_amax",
    "add_gradients",
    "compute_scales",
    "dequantize",
    "partial_amax",
    "partial_cast",
    "quantize_gradient",
    "roll_history",
    "transpose",
    "upcast",
]
