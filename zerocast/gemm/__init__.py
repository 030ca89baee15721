"""The GEMM paths of a product with a QuantizedWeight, and the choice between them. The
protocols of `choice.py` are their contract.

Where the device, the format, the shapes and the dtypes allow, a product runs on FP8 (FP4) tensor
cores through torch's scaled matrix multiply, with its other operand quantized to match. Everything
else dequantizes the weight and multiplies.
"""

from zerocast.gemm import plain
from zerocast.gemm.case import Case
from zerocast.gemm.choice import (
    EXPERTS,
    OPERATORS,
    PATHS,
    PREFERENCES,
    Choice,
    Path,
    choice_of,
    decide,
    falls_back,
    module_of,
    path_of,
    settings,
    settings_of,
    use,
    warn_nominal,
    weight_gradients_of,
)
from zerocast.gemm.operands import forget, of_input
from zerocast.gemm.scaling import is_traced

__all__ = [
    "EXPERTS",
    "OPERATORS",
    "PATHS",
    "PREFERENCES",
    "Case",
    "Choice",
    "Path",
    "choice_of",
    "decide",
    "falls_back",
    "forget",
    "is_traced",
    "module_of",
    "of_input",
    "path_of",
    "plain",
    "settings",
    "settings_of",
    "use",
    "warn_nominal",
    "weight_gradients_of",
]
