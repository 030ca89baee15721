"""identity: the master rounded to the nominal dtype, no scale (docs/formats/identity.md)."""

from zerocast.formats.spec import AmaxPolicy, Columnwise, FormatSpec, ScaleRule


def build() -> FormatSpec:
    """Unquantized storage, so that a model with weights of several formats needs only one plan, one
    set of buffers and one collective.
    """
    return FormatSpec(
        name="identity",
        element=None,
        scale_rule=ScaleRule.NONE,
        columnwise=Columnwise.NONE,
        amax_policy=AmaxPolicy.NONE,
    )
