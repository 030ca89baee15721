"""The shadow backend: the stages of the reference."""

from zerocast.backends.reference import (
    adam_amax,
    compute_scales,
    dequantize,
    partial_amax,
    partial_cast,
    roll_history,
    transpose,
)

DEVICES = ("cpu",)  # supported device types; None for any
PREFERENCE = -1  # the highest usable backend is chosen; C++ has 1, the reference 0
