"""Numbers while training: what casts do to the weights, where the time of a step goes, and what it sends.

A `Meter` looks at every so many steps and leaves the others alone. README.md says what each number is and what it costs.
"""

from zerocast.metrics.cast_meter import CastCounts, CastMeter
from zerocast.metrics.meter import NOT_MEASURED, Measurement, Meter, Sample
from zerocast.metrics.step_trace import StepTrace, TrafficCounter

__all__ = ["NOT_MEASURED", "CastCounts", "CastMeter", "Measurement", "Meter", "Sample", "StepTrace", "TrafficCounter"]
