"""Reports of made-up times, for tests of what is done with them. Nothing here was measured."""

from zerocast.bench.clock import Times
from zerocast.bench.report import CopyRate, Failure, Measurement, Report
from zerocast.bench.row import ADAM, CAST, Row, Target
from zerocast.bench.workload import Workload

TINY = Workload("T", ((32, 32),), 1)
ROW = Row(TINY, CAST, "fp8_current", Target(1.5))
ADAM_ROW = Row(TINY, ADAM, "")
COPY = CopyRate(1 << 20, before=1.0, after=3.0)  # 2 GB/s


def measured(row: Row, by: str, ms: float, host_ms: float = 0.0) -> Measurement:
    return Measurement(row, by, Times(11, ms, ms, ms, host_ms, 2 * ms), 3, None)


def report(*measurements: Measurement, full: bool = True, failures: tuple[Failure, ...] = ()) -> Report:
    machine = {"device": "None At All", "torch": "0"}
    return Report("2000-01-01", "ours", full, machine, {"scale": 1}, "Made up.", COPY, measurements, failures)
