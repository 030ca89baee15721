"""The reference backend: plain torch on any device, written for reading. It is the specification that the others equal."""

from zerocast.backends.reference.adam_amax import adam_amax
from zerocast.backends.reference.adam_step import adam_step
from zerocast.backends.reference.compute_scales import compute_scales
from zerocast.backends.reference.dequantize import dequantize
from zerocast.backends.reference.partial_amax import partial_amax
from zerocast.backends.reference.partial_cast import partial_cast
from zerocast.backends.reference.quantize import Quantized, quantize
from zerocast.backends.reference.roll_history import roll_history
from zerocast.backends.reference.transpose import transpose

DEVICES = None
PREFERENCE = 0

__all__ = [
    "Quantized",
    "adam_amax",
    "adam_step",
    "compute_scales",
    "dequantize",
    "partial_amax",
    "partial_cast",
    "quantize",
    "roll_history",
    "transpose",
]
