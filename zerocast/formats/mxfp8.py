"""mxfp8: E4M3 with one E8M0 scale per 32 elements in each direction, or per 32x32 tile
(docs/formats/mxfp8.md).
"""

from zerocast.formats.element import E4M3
from zerocast.formats.spec import AmaxPolicy, Columnwise, FormatSpec, ScaleRule

BLOCKS = ("1x32", "32x32")


def build(block: str = "1x32") -> FormatSpec:
    """Microscaling FP8.

    With "1x32" the rowwise codes have blocks of 1x32 and the columnwise codes blocks of 32x1. They
    are two casts of the same master. With "32x32" one set of codes serves both directions.
    """
    if block not in BLOCKS:
        raise ValueError(f"block must be one of {BLOCKS}, got {block!r}")
    is_square = block == "32x32"
    return FormatSpec(
        name="mxfp8",
        element=E4M3,
        scale_rule=ScaleRule.E8M0,
        columnwise=Columnwise.SHARED if is_square else Columnwise.OWN_GRID,
        amax_policy=AmaxPolicy.CURRENT,
        block=(32, 32) if is_square else (1, 32),
        columnwise_block=None if is_square else (32, 1),
        multiple=(32, 32),
    )
