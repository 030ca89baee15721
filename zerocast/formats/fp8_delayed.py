"""fp8_delayed: FP8 with one FP32 scale per tensor, from amaxes of earlier steps (docs/formats)."""

from zerocast.formats.element import fp8
from zerocast.formats.spec import AmaxPolicy, Columnwise, FormatSpec, ScaleRule

ALGORITHMS = ("max", "most_recent")


def build(
    element: str = "e4m3", margin: int = 0, amax_history_len: int = 1024, amax_compute_algo: str = "max"
) -> FormatSpec:
    """Per-tensor FP8 scaled by an amax history of `amax_history_len` steps, with `2**-margin` of
    headroom.
    """
    if amax_history_len < 1:
        raise ValueError(f"amax_history_len must be at least 1, got {amax_history_len}")
    if amax_compute_algo not in ALGORITHMS:
        raise ValueError(f"amax_compute_algo must be one of {ALGORITHMS}, got {amax_compute_algo!r}")
    return FormatSpec(
        name="fp8_delayed",
        element=fp8(element),
        scale_rule=ScaleRule.FP32,
        columnwise=Columnwise.TRANSPOSE,
        amax_policy=AmaxPolicy.DELAYED,
        margin=margin,
        amax_history_len=amax_history_len,
        amax_compute_algo=amax_compute_algo,
    )
