"""fp8_square: E5M2 with one power-of-two scale per 64x64 block."""

from zerocast.formats.element import fp8
from zerocast.formats.spec import AmaxPolicy, Columnwise, FormatSpec, ScaleRule


def build(element: str = "e5m2") -> FormatSpec:
    """The keywords are the options of the format."""
    return FormatSpec(
        name="fp8_square",
        element=fp8(element),
        scale_rule=ScaleRule.FP32,
        columnwise=Columnwise.TRANSPOSE,
        amax_policy=AmaxPolicy.CURRENT,
        block=(64, 64),
        power_of_2_scale=True,
    )
