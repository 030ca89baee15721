"""Meter: measures every n-th training step; a Sample holds the numbers."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zerocast.metrics.cast_meter import CastCounts, CastMeter
from zerocast.metrics.step_trace import StepTrace


@dataclass(frozen=True)
class Sample:
    """The numbers of one measured step.

    Attributes:
        weights: dict from the name of each quantized weight to its counts, over all ranks.
        milliseconds: times by phase and stage on this rank (`StepTrace.milliseconds`).
        nbytes: bytes of this rank's collectives by operation (`TrafficCounter`).
    """

    weights: Mapping[str, CastCounts]
    milliseconds: Mapping[str, float]
    nbytes: Mapping[str, int]

    @property
    def together(self) -> CastCounts:
        """The counts of all weights together."""
        return CastCounts.together(self.weights.values())

    def scalars(self) -> dict[str, float]:
        """Return flat names and numbers for TensorBoard: counts of all weights, `ms/...` and
        `bytes/...`.
        """
        counts = self.together.scalars() if self.weights else {}
        times = {f"ms/{name}": value for name, value in self.milliseconds.items()}
        return {**counts, **times, **{f"bytes/{name}": value for name, value in self.nbytes.items()}}

    def by_weight(self) -> dict[str, dict[str, float]]:
        """Return the counts of each weight, keyed by its name."""
        return {name: counts.scalars() for name, counts in self.weights.items()}


@dataclass
class Measurement:
    """One training step, measured or not.

    Attributes:
        sample: the numbers, set at the end of a measured step; None for any other step.
    """

    _trace: StepTrace | None = None
    sample: Sample | None = None

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Time the body as phase `name`; does nothing on a step that is not measured."""
        return self._trace.phase(name) if self._trace else contextlib.nullcontext()


NOT_MEASURED = Measurement()


class Meter:
    """Measures every `every`-th step: counts of weights, times of phases and stages, bytes sent.

        meter = zerocast.metrics.Meter(optimizer, every=100)
        for batch in batches:
            with meter.step() as measured:
                with measured.phase("backward"):
                    model(batch).backward()
                with measured.phase("step"):
                    optimizer.step()
            if measured.sample:
                log(measured.sample.scalars())

    Args:
        owner: an owner of masters, as for `zerocast.verify`: a ZeroAdamW, a plan, a model or an
            optimizer under `zerocast.fsdp2`, or the result of a host's `attach`.
        every: steps between two measurements, over which `unchanged` codes are counted.

    All ranks of the owner's group construct a meter and take the same steps with it, since a
    measurement ends with one small all-gather. Other steps run nothing, send nothing and never wait
    for the device. Raises ValueError for `every` below 1, TypeError for an object that owns no
    masters.
    """

    def __init__(self, owner: Any, every: int = 100) -> None:
        if every < 1:
            raise ValueError(f"every is at least 1, got {every}")
        self._every, self._steps = every, 0
        self._casts = CastMeter(owner)

    @contextlib.contextmanager
    def step(self) -> Iterator[Measurement]:
        """Run one training step in the body, including the optimizer's step."""
        self._steps += 1
        if self._steps % self._every:
            yield Measurement()
            return
        trace = StepTrace(self._casts.gathered_into, self._casts.device)
        measured = Measurement(trace)
        with trace:
            yield measured
        # Counting may gather weights, so it comes after the trace and is not in its numbers.
        times = trace.milliseconds()
        nbytes = dict(sorted(trace.nbytes.items()))
        measured.sample = Sample(self._casts.measure(), times, nbytes)
