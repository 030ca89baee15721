"""One run of the benchmark: a copy, every row by a backend of zerocast and by the peers, and the
copy again.

Before a row is timed, the bytes that it writes are compared with the reference backend's, so that
no wrong kernel is timed.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor

from zerocast import backends
from zerocast.bench import machine
from zerocast.bench.clock import Clock, launches
from zerocast.bench.config import CPU_SCALE, BenchConfig
from zerocast.bench.peers import usable
from zerocast.bench.report import CopyRate, Failure, Measurement, Report, copy_rate, today
from zerocast.bench.row import Build, Row, select
from zerocast.bench.workload import BenchEnv, Workload
from zerocast.weight.state import same_bytes

REFERENCE = "reference"


class WrongBytesError(Exception):
    """A backend wrote bytes that differ from the reference; the message names the buffer."""


def check(row: Row, workload: Workload, env: BenchEnv) -> None:
    """Run the row's work once by its backend and once by the reference, from the same inputs.

    All buffers start with the same random bytes for both. Raises WrongBytesError if a buffer
    differs.
    """

    def buffers(backend: str) -> Sequence[Tensor]:
        job = row.work.build(workload, row.fmt, replace(env, backend=backend))
        job.run()
        return job.written()

    written = buffers(env.backend)
    expected = buffers(REFERENCE)
    for index, (buffer, expected_buffer) in enumerate(zip_longest(written, expected)):
        if buffer is None or expected_buffer is None or not same_bytes(buffer, expected_buffer):
            raise WrongBytesError(
                f"{row.name} by {env.backend} on {workload.name}: buffer {index} of {len(expected)} differs from the reference"
            )


# The size of the copy at full scale, and the least size.
COPY_BYTES = 4 << 30
FEWEST_COPY_BYTES = 1 << 20
# Called with the name of the measurement that begins.
Progress = Callable[[str], object]


class Bench:
    """A run of the benchmark: the device and backend, the clock, and the selected rows.

    Raises RuntimeError for a backend that cannot be used here, ValueError for an unknown backend or
    row.
    """

    def __init__(self, config: BenchConfig) -> None:
        device = _device(config.backend)
        self._config = config
        self._scale = config.scale or (1 if device.type == "cuda" else CPU_SCALE)
        self._env = BenchEnv(device, backends.choose(device, config.backend), config.seed)
        self._clock = Clock(device, config.seconds)
        self._rows = select(config.only, self._scale)
        self._peers = usable(device.type) if config.peers else []

    @property
    def rows(self) -> list[Row]:
        """The selected rows, in the order of the report."""
        return self._rows

    def run(self, progress: Progress = str) -> Report:
        """Measure the selected rows. `progress` is called before each measurement."""
        nbytes = max(FEWEST_COPY_BYTES, COPY_BYTES // self._scale**2)
        before = self._copy_rate(nbytes)
        measurements: list[Measurement] = []
        failures: list[Failure] = []
        for row in self._rows:
            for by, build in self._contenders(row):
                progress(f"{row.name} by {by}")
                result = self._attempt(row, by, build)
                if isinstance(result, Measurement):
                    measurements.append(result)
                else:
                    failures.append(result)
        copy = CopyRate(nbytes, before, self._copy_rate(nbytes))
        return self._report(copy, measurements, failures)

    def _contenders(self, row: Row) -> list[tuple[str, Build]]:
        """Return (name, build) of zerocast's backend, then of the peers, which take flat masters
        only.
        """
        peers = self._peers if row.workload.flat else []
        peer_builds = [(peer.name, peer.works[row.work.name]) for peer in peers if row.work.name in peer.works]
        return [(self._env.backend, row.work.build), *peer_builds]

    def _attempt(self, row: Row, by: str, build: Build) -> Measurement | Failure:
        """Measure a row; any error becomes a Failure, so that the other rows still run."""
        ours = by == self._env.backend
        try:
            return self._measure(row, by, build, ours)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            return Failure(row, by, f"{type(error).__name__}: {reason}", ours)
        finally:
            if self._env.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()

    def _measure(self, row: Row, by: str, build: Build, ours: bool) -> Measurement:
        checked = None
        if ours and by != REFERENCE:
            small = row.workload.scaled(max(1, self._config.check_scale // self._scale))
            check(row, small, self._env)
            checked = small.name
        job = build(row.workload, row.fmt, self._env)
        times = self._clock.time(job.run)
        return Measurement(row, by, times, launches(job.run, self._env.device), checked)

    def _copy_rate(self, nbytes: int) -> float:
        return copy_rate(self._clock, self._env.device, nbytes)

    def _report(self, copy: CopyRate, measurements: list[Measurement], failures: list[Failure]) -> Report:
        device = self._env.device
        settings = {name: getattr(self._config, name) for name in ("only", "check_scale", "peers", "seconds", "seed")}
        return Report(
            date=today(),
            backend=self._env.backend,
            machine=machine.describe(device),
            settings={**settings, "scale": self._scale, "flushed": self._clock.flushed},
            method=_method(self._clock, self._scale, device),
            copy=copy,
            measurements=tuple(measurements),
            failures=tuple(failures),
        )


def _device(backend: str | None) -> torch.device:
    """Return the GPU, if there is one on which the requested backend runs; else the CPU."""
    gpu = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    if gpu is not None and (backend is None or backends.why_not(backend, gpu) is None):
        return gpu
    return torch.device("cpu")


def _method(clock: Clock, scale: int, device: torch.device) -> str:
    if device.type == "cuda":
        times = "Times are medians of CUDA events around single calls, each after a copy of "
        times += f"{clock.flushed / 1e6:.0f} MB that overwrites the L2"
    else:
        times = "Times are medians of single calls by the host's clock; nothing is flushed"
    size = "full size" if scale == 1 else f"rows, columns and layers divided by {scale}: for testing"
    return (
        f"{times}; rows B are wall time, host included, of calls made back to back. Bytes are those that must move "
        f"(zerocast/bench/traffic.py). Workloads at {size}."
    )
