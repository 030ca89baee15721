"""fp8_current: FP8 with one FP32 scale per tensor, from this step's amax (docs/formats)."""

from zerocast.formats.element import fp8
from zerocast.formats.spec import AmaxPolicy, Columnwise, FormatSpec, ScaleRule


def build(element: str = "e4m3", power_of_2_scale: bool = False, amax_epsilon: float = 0.0) -> FormatSpec:
    """Per-tensor FP8 scaled by the amax of the weight being cast."""
    return FormatSpec(
        name="fp8_current",
        element=fp8(element),
        scale_rule=ScaleRule.FP32,
        columnwise=Columnwise.TRANSPOSE,
        amax_policy=AmaxPolicy.CURRENT,
        power_of_2_scale=power_of_2_scale,
        amax_epsilon=amax_epsilon,
    )
