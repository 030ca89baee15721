"""Clock: the time of a call on the device, on the CPU, and from end to end.

Device time is the median, over many calls, of the time between two CUDA events around one call.
Before each call a copy of several times the size of the L2 overwrites the L2, so that a call finds
none of its data there and pays for writing back dirty lines, as in a training step. The copy also
lets the host run ahead, so that launch gaps are not part of device time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles

import torch

Run = Callable[[], object]
# Calls before a measurement.
WARM_UP = 5
# Limits on the calls of a measurement.
FEWEST_CALLS = 11
MAX_CALLS = 300
# Windows of calls back to back, for wall time.
WINDOWS = 5
# The copy between calls, as a multiple of the L2.
L2_MULTIPLE = 8


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call: medians over `calls` calls, and percentiles of the device time.

    Attributes:
        device_ms: time on the device. On a CPU it is the CPU time.
        host_ms: time until the call returns, on an idle device.
        wall_ms: time of calls made back to back, up to the end of the last one, divided by their
            number; the median of five such windows.
    """

    calls: int
    device_ms: float
    device_p10_ms: float
    device_p90_ms: float
    host_ms: float
    wall_ms: float


class Clock:
    """Times calls on `device`. Each kind of measurement takes about `seconds`.

    Attributes:
        flushed: the bytes of the copy before each call.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device = device
        self._seconds = seconds
        # Nothing is flushed on a CPU.
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
        self.flushed = l2_bytes * L2_MULTIPLE
        # Source and target of the copy that overwrites the L2.
        self._flush = [torch.zeros(self.flushed // 4, device=device) for _ in range(2)]

    def time(self, run: Run) -> Times:
        """Measure a call, after some calls to warm up."""
        for _ in range(WARM_UP):
            run()
        seconds = self._elapsed(lambda: [run() for _ in range(3)]) / 3
        calls = max(FEWEST_CALLS, min(MAX_CALLS, int(self._seconds / seconds)))
        device_times = self._events(run, calls) if self._device.type == "cuda" else self._host(run, calls)
        deciles = quantiles(device_times, n=10)
        return Times(
            calls=calls,
            device_ms=median(device_times),
            device_p10_ms=deciles[0],
            device_p90_ms=deciles[-1],
            host_ms=median(self._host(run, calls)),
            wall_ms=median(self._windows(run, calls)),
        )

    def _elapsed(self, run: Run) -> float:
        """Return the seconds from an idle device to an idle device."""
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


def launches(run: Run, device: torch.device) -> int | None:
    """Return the kernels, fills and copies of one call, counted by torch.profiler; None if it sees
    none.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize(device)
    return len([event for event in profile.events() or () if event.device_type.name == "CUDA"]) or None
