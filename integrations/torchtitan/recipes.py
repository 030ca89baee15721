"""The recipe of a JobConfig: the name of the converter whose section holds it, and how its entries are read."""

import zerocast

NAME = "quantize.linear.zerocast"


def recipe_of(entries: list[str]) -> zerocast.Recipe:
    """The recipe of entries `pattern=format`. ValueError for none, for one that is something else, and for an unknown format."""
    split = [entry.rpartition("=") for entry in entries]
    wrong = [entry for entry, (pattern, _, fmt) in zip(entries, split, strict=True) if not pattern or not fmt]
    if wrong or not entries:
        raise ValueError(
            f"{NAME}.recipe is a list of pattern=format, as layers.*.weight=nvfp4, got {wrong[0] if wrong else 'nothing'!r}"
        )
    return zerocast.Recipe({pattern: fmt for pattern, _, fmt in split})
