"""Metrics during training: the effect of casts on weights, step times and collective traffic.

A `Meter` measures every N-th step and does not affect the others. README.md defines each number and
its cost.
"""

from zerocast.metrics.cast_meter import CastCounts, CastMeter
from zerocast.metrics.meter import NOT_MEASURED, Measurement, Meter, Sample, StepTrace, TrafficCounter

__all__ = ["NOT_MEASURED", "CastCounts", "CastMeter", "Measurement", "Meter", "Sample", "StepTrace", "TrafficCounter"]
