"""The contents of a checkpoint and their casts, for `zerocast inspect` and `zerocast export`."""

from zerocast.inspection.cast_statistics import CastStatistics, measure
from zerocast.inspection.contents import Chosen, Contents, choose

__all__ = ["CastStatistics", "Chosen", "Contents", "choose", "measure"]
