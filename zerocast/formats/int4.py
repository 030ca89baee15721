"""int4: integers from -7 to 7 with one bf16 scale per 32 elements of a row
(docs/formats/int4.md).
"""

from zerocast.formats.element import INT4
from zerocast.formats.spec import AmaxPolicy, Columnwise, FormatSpec, ScaleRule


def build() -> FormatSpec:
    """Symmetric INT4 in groups of 32, with the grid and the bytes of Kimi's checkpoints."""
    return FormatSpec(
        name="int4",
        element=INT4,
        scale_rule=ScaleRule.BF16,
        columnwise=Columnwise.NONE,
        amax_policy=AmaxPolicy.CURRENT,
        block=(1, 32),
        multiple=(1, 32),
    )
