"""Meter: measures every n-th training step; a Sample holds the numbers. StepTrace: the times of the
stages of a step and the bytes that it sends, observed at torch's dispatcher.

A dispatch mode sees every operator, no matter which code calls it. It slows each operator down a
little, so it is entered for single steps only.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerocast.metrics.cast_meter import CastCounts, CastMeter

Moment = torch.cuda.Event | float


class Clock:
    """Marks on the timeline of a device. A label has the time from its mark to the next mark.

    On a GPU the marks are CUDA events, so nothing waits until times are read. Otherwise they are
    times of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Moment]] = []

    def mark(self, label: str) -> None:
        """End the previous label and begin `label`."""
        self._marks.append((label, self._now()))

    def milliseconds(self) -> dict[str, float]:
        """Return the total time of each label. Waits for the device. The last mark only ends the
        label before it.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        times: dict[str, float] = {}
        for (label, start), (_, end) in pairwise(self._marks):
            times[label] = times.get(label, 0.0) + _between(start, end)
        return times

    def _now(self) -> Moment:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _between(start: Moment, end: Moment) -> float:
    """Return the milliseconds between two marks of the same clock."""
    if isinstance(start, float) or isinstance(end, float):
        return 1e3 * (float(end) - float(start))  # type: ignore[arg-type]
    elapsed: float = start.elapsed_time(end)
    return elapsed


# Operator -> the stage of a cast that it is.
STAGES = {
    "zerocast::adam_8bit": "adam",
    "zerocast::adam_8bit_cast": "adam",
    "zerocast::adam_amax": "adam",
    "zerocast::adam_cast": "adam",
    "c10d::allreduce_": "all_reduce",
    "zerocast::partial_amax": "amax",
    "zerocast::compute_scales": "scales_and_cast",
    "zerocast::partial_cast": "scales_and_cast",
    "zerocast::roll_history": "scales_and_cast",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "zerocast::transpose": "columnwise",
}
GATHER, REST = "all_gather", "rest"


class TrafficCounter(TorchDispatchMode):
    """While entered, adds up the bytes of this process's collectives by operation.

    The size of a collective is the size of its larger side, this rank's part included: the output
    of an all-gather, the input of a reduce-scatter (a ring sends (n - 1) / n of it). All-gathers
    into the storages of `weights`, or all of them if `weights` is None, count as `weight_gather`.
    All other collectives count under the name of the operation.

    Attributes:
        nbytes: bytes so far, by operation.
    """

    def __init__(self, weights: Iterable[Tensor] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: Counter[str] = Counter()
        self._weights = None if weights is None else {tensor.untyped_storage().data_ptr() for tensor in weights}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run `func` and count its bytes if it is a collective."""
        if func.namespace == "c10d":
            self._count(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        # The first two arguments of the operators of c10d are outputs and inputs. An all-reduce has
        # its tensors in the first and none in the second.
        outputs, inputs = _tensors(args[0]), _tensors(args[1])
        is_weight = "allgather" in name and any(self._is_weight(tensor) for tensor in outputs)
        self.nbytes["weight_gather" if is_weight else name] += max(_nbytes(outputs), _nbytes(inputs))

    def _is_weight(self, tensor: Tensor) -> bool:
        return self._weights is None or tensor.untyped_storage().data_ptr() in self._weights


class StepTrace(TrafficCounter):
    """A TrafficCounter that also times the caller's phases and the stages of a cast within them.

    A stage ends with its operator. A collective continues after its call, so the time up to the
    next mark counts as its own. After an all-gather of weights the time counts as the gather's
    until the phase ends, since a step has no other work left at that point. Without `weights`, as
    under FSDP2, the gather overlaps the forward and backward passes and is not a stage.
    """

    def __init__(self, weights: Iterable[Tensor] | None, device: torch.device) -> None:
        super().__init__(weights)
        self._stages = {op: stage for op, stage in STAGES.items() if weights is not None or stage != GATHER}
        self._clock = Clock(device)
        # The current phase, and the stage that the time between operators counts for; else empty.
        self._phase = ""
        self._waits_for = ""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run `func` and time it if it is a stage."""
        stage = self._stages.get(func._schema.name)
        if stage is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._clock.mark(self._label(stage))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if stage == GATHER:
            self._waits_for = GATHER
        elif func.namespace != "c10d":
            # A collective is not over when its call returns, so only other stages end here.
            self._clock.mark(self._label(self._waits_for or REST))
        return out

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as phase `name`. Raises RuntimeError for nested phases."""
        if self._phase:
            raise RuntimeError(f"phase {name} begins within phase {self._phase}: phases follow each other")
        self._phase = name
        self._clock.mark(self._label(REST))
        try:
            yield
        finally:
            self._phase = self._waits_for = ""
            self._clock.mark(REST)

    def __enter__(self) -> "StepTrace":
        self._clock.mark(REST)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._clock.mark(REST)

    def milliseconds(self) -> dict[str, float]:
        """Return the times by phase, by stage within a phase (`step/adam`) and in `total`. Waits
        for the device.
        """
        by_label = self._clock.milliseconds()
        times = {"total": sum(by_label.values())}
        for label, value in by_label.items():
            phase, _, stage = label.partition("/")
            times[phase] = times.get(phase, 0.0) + value
            if stage and stage != REST:
                times[label] = value
        return times

    def _label(self, stage: str) -> str:
        return f"{self._phase}/{stage}" if self._phase else stage


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


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
        self._every = every
        self._steps = 0
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
