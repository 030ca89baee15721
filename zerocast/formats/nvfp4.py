"""nvfp4: E2M1 with an E4M3 scale a 16x16 tile under one FP32 scale (docs/formats/nvfp4.md)."""

from zerocast.formats.element import E2M1
from zerocast.formats.spec import AmaxPolicy, Columnwise, FormatSpec, ScaleRule

CHOICES = ("none", "mae", "mse")
LARGEST_SCALES = (256, 448)


def build(four_over_six: str = "none", scale_max: int = 256) -> FormatSpec:
    """Two-level NVFP4 for weights: 2-D tiles, round to nearest even, no Hadamard transform.

    With `four_over_six` each tile takes the scale that makes its amax the code 6 or the code 4,
    whichever has the smaller error, "mae" (sum of magnitudes) or "mse" (sum of squares).
    `scale_max` goes with it: 256, or 448, with which the tile of the tensor's amax has no choice.
    """
    if four_over_six not in CHOICES:
        raise ValueError(f"four_over_six must be one of {CHOICES}, got {four_over_six!r}")
    if scale_max not in LARGEST_SCALES:
        raise ValueError(f"scale_max must be one of {LARGEST_SCALES}, got {scale_max}")
    chooses = four_over_six != "none"
    if not chooses and scale_max != 256:
        raise ValueError(f"scale_max={scale_max} goes with four_over_six; without it nvfp4's largest scale is 448")
    return FormatSpec(
        name="nvfp4",
        element=E2M1,
        scale_rule=ScaleRule.TWO_LEVEL,
        columnwise=Columnwise.TRANSPOSE,
        amax_policy=AmaxPolicy.CURRENT,
        block=(16, 16),
        multiple=(16, 16),
        scale_max=scale_max if chooses else 448,
        four_over_six=four_over_six,
    )
