"""The reference backend: plain torch on any device, written to be read.

It is the executable specification: every other backend produces the same bytes.
"""

from zerocast.backends.reference.adam import adam_8bit, adam_amax
from zerocast.backends.reference.quantize import Quantized, quantize
from zerocast.backends.reference.stages import (
    add_gradients,
    compute_scales,
    dequantize,
    partial_amax,
    partial_cast,
    quantize_gradient,
    roll_history,
    transpose,
    upcast,
)

DEVICES = None
PREFERENCE = 0

__all__ = [
    "Quantized",
    "adam_8bit",
    "adam_amax",
    "add_gradients",
    "compute_scales",
    "dequantize",
    "partial_amax",
    "partial_cast",
    "quantize",
    "quantize_gradient",
    "roll_history",
    "transpose",
    "upcast",
]
