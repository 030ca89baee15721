"""mxfp8: E4M3 with an E8M0 scale for 32 elements in each direction, or for 32x32
(docs/formats/mxfp8.md).
"""

from zerocast.formats.element import E4M3
from zerocast.formats.spec import AmaxPolicy, Columnwise, FormatSpec, ScaleRule

BLOCKS = ("1x32", "32x32")


def build(block: str = "1x32") -> FormatSpec:
    """Microscaling FP8.

    With blocks of 1x32 the rowwise codes and the columnwise ones, of 32x1 blocks, are different
    casts of the same master. With blocks of 32x32 one set of codes serves both directions.
    """
    if block not in BLOCKS:
        raise ValueError(f"block must be one of {BLOCKS}, got {block!r}")
    square = block == "32x32"
    return FormatSpec(
        name="mxfp8",
        element=E4M3,
        scale_rule=ScaleRule.E8M0,
        columnwise=Columnwise.SHARED if square else Columnwise.OWN_GRID,
        amax_policy=AmaxPolicy.CURRENT,
        block=(32, 32) if square else (1, 32),
        columnwise_block=None if square else (32, 1),
        multiple=(32, 32),
    )
