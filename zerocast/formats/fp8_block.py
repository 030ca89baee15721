"""fp8_block: FP8 with one FP32 scale per 128x128 block (docs/formats/fp8_block.md)."""

from zerocast.formats.element import fp8
from zerocast.formats.spec import AmaxPolicy, Columnwise, FormatSpec, ScaleRule


def build(element: str = "e4m3", power_of_2_scale: bool = True, amax_epsilon: float = 0.0) -> FormatSpec:
    """Blockwise FP8. Blocks at the right and bottom edges may be smaller than 128x128."""
    return FormatSpec(
        name="fp8_block",
        element=fp8(element),
        scale_rule=ScaleRule.FP32,
        columnwise=Columnwise.TRANSPOSE,
        amax_policy=AmaxPolicy.CURRENT,
        block=(128, 128),
        power_of_2_scale=power_of_2_scale,
        amax_epsilon=amax_epsilon,
    )
