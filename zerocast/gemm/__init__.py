"""The GEMM paths of a product with a QuantizedWeight, and the choice between them. One module a
path; README.md is the contract.

Where the device, the format, the shapes and the dtypes allow, a product runs on FP8 (FP4) tensor
cores through torch's scaled matrix multiply, with its other operand quantized to match. Everything
else dequantizes the weight and multiplies.
"""

from zerocast.gemm.case import Case
from zerocast.gemm.choice import (
    GRADIENTS,
    OPERATORS,
    PATHS,
    WISHES,
    Choice,
    Path,
    choice_of,
    decide,
    falls_back,
    path_of,
    say_nominal,
    use,
    ways,
    weight_gradients_of,
    wishes,
)
from zerocast.gemm.operands import forget, of_input
from zerocast.gemm.scaling import is_traced

__all__ = [
    "GRADIENTS",
    "OPERATORS",
    "PATHS",
    "WISHES",
    "Case",
    "Choice",
    "Path",
    "choice_of",
    "decide",
    "falls_back",
    "forget",
    "is_traced",
    "of_input",
    "path_of",
    "say_nominal",
    "use",
    "ways",
    "weight_gradients_of",
    "wishes",
]
