"""mxfp4: E2M1 with one E8M0 scale per 32x32 tile, exact in FP8 (docs/formats/mxfp4.md)."""

from zerocast.formats.element import E2M1
from zerocast.formats.spec import AmaxPolicy, Columnwise, FormatSpec, ScaleRule

ROUNDINGS = ("up", "floor")


def build(scale_rounding: str = "up", exact_in_fp8: bool = True) -> FormatSpec:
    """Microscaling FP4 for weights: square tiles, round to nearest even.

    `scale_rounding` is "up", so that no element saturates, or "floor", the rule of the OCP
    specification. With `exact_in_fp8` no scale in a 128x128 block is below 2**-14 of the largest
    scale in it. Every value is then an E4M3 number under one scale per block.
    """
    if scale_rounding not in ROUNDINGS:
        raise ValueError(f"scale_rounding must be one of {ROUNDINGS}, got {scale_rounding!r}")
    return FormatSpec(
        name="mxfp4",
        element=E2M1,
        scale_rule=ScaleRule.E8M0,
        columnwise=Columnwise.TRANSPOSE,
        amax_policy=AmaxPolicy.CURRENT,
        block=(32, 32),
        scale_group=(128, 128) if exact_in_fp8 else None,
        scale_rounding=scale_rounding,
        multiple=(32, 32),
    )
