"""nvfp4: E2M1 with one E4M3 scale per 16x16 tile and one FP32 scale per tensor
(docs/formats/nvfp4.md).
"""

from zerocast.formats.element import E2M1
from zerocast.formats.spec import AmaxPolicy, Columnwise, FormatSpec, ScaleRule


def build() -> FormatSpec:
    """Two-level NVFP4 for weights: 2-D tiles, round to nearest even, no Hadamard transform."""
    return FormatSpec(
        name="nvfp4",
        element=E2M1,
        scale_rule=ScaleRule.TWO_LEVEL,
        columnwise=Columnwise.TRANSPOSE,
        amax_policy=AmaxPolicy.CURRENT,
        block=(16, 16),
        multiple=(16, 16),
    )
