"""mxfp8: E4M3 with an E8M0 scale for 32 elements, in each direction (docs/formats/mxfp8.md)."""

from zerocast.formats.element import E4M3
from zerocast.formats.spec import AmaxPolicy, Columnwise, FormatSpec, ScaleRule


def build() -> FormatSpec:
    """Microscaling FP8; rowwise 1x32 and columnwise 32x1 codes are different casts of the same
    master.
    """
    return FormatSpec(
        name="mxfp8",
        element=E4M3,
        scale_rule=ScaleRule.E8M0,
        columnwise=Columnwise.OWN_GRID,
        amax_policy=AmaxPolicy.CURRENT,
        block=(1, 32),
        columnwise_block=(32, 1),
        multiple=(32, 32),
    )
