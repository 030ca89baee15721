"""What is in a checkpoint, and what a format would make of it: behind `zerocast inspect` and `zerocast convert`."""

from zerocast.inspection.cast_statistics import CastStatistics, measure
from zerocast.inspection.contents import Contents
from zerocast.inspection.format_selection import Chosen, choose

__all__ = ["CastStatistics", "Chosen", "Contents", "choose", "measure"]
