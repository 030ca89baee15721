"""nvfp4: E2M1 with one E4M3 scale per 16x16 tile and one FP32 scale per tensor
(docs/formats/nvfp4.md).
"""

from zerocast.formats.element import E2M1
from zerocast.formats.spec import AmaxPolicy, Columnwise, FormatSpec, ScaleRule


def build(exact_in_fp8: bool = False) -> FormatSpec:
    """Two-level NVFP4 for weights: 2-D tiles, round to nearest even, no Hadamard transform.

    With `exact_in_fp8` the scale of a tile has the mantissa 1, 1.25 or 1.5. Every value is then an
    E4M3 number under one scale of the tensor.
    """
    return FormatSpec(
        name="nvfp4",
        element=E2M1,
        scale_rule=ScaleRule.TWO_LEVEL,
        columnwise=Columnwise.TRANSPOSE,
        amax_policy=AmaxPolicy.CURRENT,
        block=(16, 16),
        exact_scales=exact_in_fp8,
        multiple=(16, 16),
    )
