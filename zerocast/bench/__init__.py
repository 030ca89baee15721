"""The benchmark: casts, Adam steps and columnwise copies of a large model against a memory copy.

`zerocast bench` is its command line; README.md describes what is measured and how. Workloads, rows,
measurements and reports are plain values. Memory is allocated only while a row is measured, one row
at a time.
"""

from zerocast.bench.config import BenchConfig
from zerocast.bench.report import Report
from zerocast.bench.run import Bench

__all__ = ["Bench", "BenchConfig", "Report"]
