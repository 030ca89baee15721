"""StepTrace: where the time of a step goes and what it sends, observed at torch's dispatcher.

A dispatch mode sees every operator, whoever calls it. It slows each operator down a little, so it is entered for single steps only.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Moment = torch.cuda.Event | float


class Clock:
    """CUDA events where there is a GPU, which nothing waits for until times are asked for; else the time of the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Moment]] = []

    def mark(self, label: str) -> None:
        """What follows is `label`."""
        self._marks.append((label, self._now()))

    def milliseconds(self) -> dict[str, float]:
        """The time of each label; the last mark only ends what was before it. Waits for the device."""
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
    if isinstance(start, float) or isinstance(end, float):
        return 1e3 * (float(end) - float(start))  # type: ignore[arg-type]
    elapsed: float = start.elapsed_time(end)
    return elapsed


STAGES = {
    "zerocast::adam_amax": "adam",
    "zerocast::adam_step": "adam",
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
    """While entered, adds up the bytes of the collectives that this process issues, by what they are for.

    The size of a collective is its full-size side: what an all-gather puts out, what a reduce-scatter takes in, this rank's own
    part included (a ring sends (n - 1) / n of it). All-gathers into the storages of `weights`, or all if that is None, are
    `weight_gather`, the rest goes by the name of its operation.
    """

    def __init__(self, weights: Iterable[Tensor] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: Counter[str] = Counter()
        self._weights = None if weights is None else {tensor.untyped_storage().data_ptr() for tensor in weights}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run `func`, and count it if it is a collective."""
        if func.namespace == "c10d":
            self._count(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        outputs, inputs = _tensors(args[0]), _tensors(args[1])
        is_weight = "allgather" in name and any(self._is_weight(tensor) for tensor in outputs)
        self.nbytes["weight_gather" if is_weight else name] += max(_nbytes(outputs), _nbytes(inputs))

    def _is_weight(self, tensor: Tensor) -> bool:
        return self._weights is None or tensor.untyped_storage().data_ptr() in self._weights


class StepTrace(TrafficCounter):
    """Counts as its base does, and takes the time of phases that the caller names and of the stages of a cast within them.

    A stage ends with its operator; but a collective goes on after it was issued, so what passes until the next stage begins counts
    as the collective's if it was waited for there. Of the all-gather that is taken for granted, since nothing else is left to do;
    without `weights`, as under FSDP2, it runs beside the passes and is no stage.
    """

    def __init__(self, weights: Iterable[Tensor] | None, device: torch.device) -> None:
        super().__init__(weights)
        self._stages = {op: stage for op, stage in STAGES.items() if weights is not None or stage != GATHER}
        self._clock, self._phase, self._waits_for = Clock(device), "", ""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run `func`, and take its time if it is a stage."""
        stage = self._stages.get(func._schema.name)
        if stage is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._clock.mark(self._label(stage))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if stage == GATHER:
            self._waits_for = GATHER
        elif func.namespace != "c10d":  # a collective is still on its way
            self._clock.mark(self._label(self._waits_for or REST))
        return out

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs within is phase `name`, and what runs in it of no stage is the rest of it; phases do not nest."""
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
        """By phase, by stage within a phase (`step/adam`), and in all; waits for the device."""
        found = self._clock.milliseconds()
        times = {"total": sum(found.values())}
        for label, value in found.items():
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
