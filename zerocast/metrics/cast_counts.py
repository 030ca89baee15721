"""CastCounts: what a cast has done to the elements of one weight, or of many; sums, so that parts of ranks and weights add up."""

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class CastCounts:
    """Elements of masters m and what their codes stand for, y.

    Attributes:
        elements: how many masters there are.
        nonfinite: masters that are NaN or Inf.
        saturated: masters that lie above the largest value of their block by more than half of its last step: clipped, not rounded.
        flushed: masters other than zero that the weight holds as zero.
        unchanged: elements whose code is that of the measurement before.
        square_error: sum of (y - m)**2 over finite masters.
        square_sum: sum of m**2 over finite masters.
        amax: the largest |m|, NaN ignored.
    """

    elements: int = 0
    nonfinite: int = 0
    saturated: int = 0
    flushed: int = 0
    unchanged: int = 0
    square_error: float = 0.0
    square_sum: float = 0.0
    amax: float = 0.0

    @staticmethod
    def together(parts: Iterable["CastCounts"]) -> "CastCounts":
        """All parts as one: sums, in their order, and the largest amax."""
        columns = list(zip(*map(astuple, parts), strict=True))
        values = [*map(sum, columns[:-1]), max(columns[-1])] if columns else []
        return CastCounts(*values)

    @property
    def cast_error(self) -> float:
        """sqrt(sum (y - m)**2 / sum m**2): the error of the cast relative to the masters."""
        return math.sqrt(self.square_error / self.square_sum) if self.square_sum else 0.0

    def scalars(self) -> dict[str, float]:
        """What one logs: shares of the elements in percent, the relative error, the amax, how many masters are not finite."""
        share = 100.0 / max(self.elements, 1)
        return {
            "saturated_percent": share * self.saturated,
            "flushed_percent": share * self.flushed,
            "unchanged_percent": share * self.unchanged,
            "cast_error": self.cast_error,
            "amax": self.amax,
            "nonfinite": self.nonfinite,
        }
