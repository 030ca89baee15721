"""Meter: measures one training step in so many and leaves the others alone; a Sample holds what it measured."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zerocast.metrics.cast_meter import CastCounts, CastMeter
from zerocast.metrics.step_trace import StepTrace


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


@dataclass
class Measurement:
    """One step, measured or not. `sample` is there after a measured step, and None otherwise."""

    _trace: StepTrace | None = None
    sample: Sample | None = None

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Take the time of what runs within as that of phase `name`; nothing on a step that is not measured."""
        return self._trace.phase(name) if self._trace else contextlib.nullcontext()


NOT_MEASURED = Measurement()


class Meter:
    """Every `every`-th step: counts of all quantized weights, time of phases and stages, bytes of collectives.

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
        owner: what `zerocast.verify` takes: a ZeroAdamW, a plan, a model or an optimizer under `zerocast.fsdp2`, what `attach` of a
            host returns.
        every: steps between two measurements; the `unchanged` codes are those that stayed what they were so long.

    All ranks of the owner's group make one and take the same steps with it: a measurement ends with one small all-gather. On the
    steps between nothing runs, nothing is sent and nothing waits for the device. Raises ValueError for `every` below 1, TypeError
    for what owns no masters.
    """

    def __init__(self, owner: Any, every: int = 100) -> None:
        if every < 1:
            raise ValueError(f"every is at least 1, got {every}")
        self._every, self._steps = every, 0
        self._casts = CastMeter(owner)

    @contextlib.contextmanager
    def step(self) -> Iterator[Measurement]:
        """One training step, the optimizer's step included."""
        self._steps += 1
        if self._steps % self._every:
            yield Measurement()
            return
        trace = StepTrace(self._casts.gathered_into, self._casts.device)
        measured = Measurement(trace)
        with trace:
            yield measured
        times, nbytes = trace.milliseconds(), dict(sorted(trace.nbytes.items()))
        measured.sample = Sample(self._casts.measure(), times, nbytes)
