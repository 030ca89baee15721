"""identity: the master rounded to the nominal dtype, no scale (docs/formats/identity.md)."""

from zerocast.formats.spec import AmaxPolicy, Columnwise, FormatSpec, ScaleRule


def build() -> FormatSpec:
    """High-precision storage, so that mixed models go through the same plan, buffers and collectives."""
    return FormatSpec(
        name="identity",
        element=None,
        scale_rule=ScaleRule.NONE,
        columnwise=Columnwise.NONE,
        amax_policy=AmaxPolicy.NONE,
    )
