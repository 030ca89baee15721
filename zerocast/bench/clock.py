"""Clock: the time of a call on the device, on the host, and from end to end.

Device time is measured between two CUDA events around one call; the median of many calls counts.
Before each call a copy of several times the size of the L2 overwrites it, so that a call finds none
of its data there and pays for writing back dirty lines, as in a training step. The copy also lets
the host run ahead, so that launch gaps are not part of device time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles

import torch

Run = Callable[[], object]
WARM_UP = 5
FEWEST, MOST = 11, 300  # calls a measurement
WINDOWS = 5
L2_MULTIPLE = 8


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call: medians over `calls` calls, and percentiles of the device time.

    Attributes:
        host_ms: time until the call returns, on an idle device.
        wall_ms: time of calls made back to back, up to the end of the last one, divided by their
            number; the median of five such windows.

    On a CPU, device and host time are the same.
    """

    calls: int
    device_ms: float
    device_p10_ms: float
    device_p90_ms: float
    host_ms: float
    wall_ms: float


class Clock:
    """Times calls on `device`; each kind of measurement takes about `seconds`."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device, self._seconds = device, seconds
        self.flushed = _l2_bytes(device) * L2_MULTIPLE
        self._flush = [torch.zeros(self.flushed // 4, device=device) for _ in range(2)]

    def time(self, run: Run) -> Times:
        """Measure a call after some calls to warm up."""
        for _ in range(WARM_UP):
            run()
        calls = self._calls(run)
        device = self._events(run, calls) if self._device.type == "cuda" else self._host(run, calls)
        deciles = quantiles(device, n=10)
        host, wall = median(self._host(run, calls)), median(self._windows(run, calls))
        return Times(calls, median(device), deciles[0], deciles[-1], host, wall)

    def _calls(self, run: Run) -> int:
        took = self._elapsed(lambda: [run() for _ in range(3)]) / 3
        return max(FEWEST, min(MOST, int(self._seconds / took)))

    def _elapsed(self, run: Run) -> float:
        """Seconds from an idle device to an idle device."""
        self._synchronize()
        start = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - start

    def _events(self, run: Run, calls: int) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for before, after in pairs:
            self._flush[1].copy_(self._flush[0])
            before.record()
            run()
            after.record()
        self._synchronize()
        return [before.elapsed_time(after) for before, after in pairs]

    def _host(self, run: Run, calls: int) -> list[float]:
        times = []
        for _ in range(calls):
            self._synchronize()
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    def _windows(self, run: Run, calls: int) -> list[float]:
        each = -(-calls // WINDOWS)
        return [self._elapsed(lambda: [run() for _ in range(each)]) * 1e3 / each for _ in range(WINDOWS)]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _l2_bytes(device: torch.device) -> int:
    """The size of the L2; 0 on a CPU, where nothing is flushed."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def launches(run: Run, device: torch.device) -> int | None:
    """The kernels, fills and copies of one call, counted by torch.profiler; None if it sees
    none.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize(device)
    return len([event for event in profile.events() or () if event.device_type.name == "CUDA"]) or None
