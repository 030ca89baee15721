"""Sample: all numbers of one measured step."""

from collections.abc import Mapping
from dataclasses import dataclass

from zerocast.metrics.cast_counts import CastCounts


@dataclass(frozen=True)
class Sample:
    """What a `Meter` has found.

    Attributes:
        weights: counts of each quantized weight by its name, over all ranks.
        milliseconds: by phase and stage (`StepTrace.milliseconds`), as this rank sees them.
        nbytes: bytes of this rank's collectives by operation (`TrafficCounter`).
    """

    weights: Mapping[str, CastCounts]
    milliseconds: Mapping[str, float]
    nbytes: Mapping[str, int]

    @property
    def together(self) -> CastCounts:
        """All weights as one."""
        return CastCounts.together(self.weights.values())

    def scalars(self) -> dict[str, float]:
        """Flat names and numbers, for TensorBoard and the like: counts of all weights together, `ms/...`, `bytes/...`."""
        counts = self.together.scalars() if self.weights else {}
        times = {f"ms/{name}": value for name, value in self.milliseconds.items()}
        return {**counts, **times, **{f"bytes/{name}": value for name, value in self.nbytes.items()}}

    def by_weight(self) -> dict[str, dict[str, float]]:
        """The counts of each weight alone, by its name."""
        return {name: counts.scalars() for name, counts in self.weights.items()}
