"""Clock: marks on the timeline of a device; the time from each mark to the next belongs to its label."""

import time
from itertools import pairwise

import torch

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
