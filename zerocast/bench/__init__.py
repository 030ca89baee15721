"""The benchmark: casts, Adam steps and columnwise copies at the size of a large model, held against a copy of memory.

`zerocast bench` is its command line; README.md says what is measured and how. A workload, a row, a measurement and a report are
values: nothing is allocated until a row is measured, and a row is measured alone.
"""

from zerocast.bench.config import BenchConfig
from zerocast.bench.report import Report
from zerocast.bench.run import Bench

__all__ = ["Bench", "BenchConfig", "Report"]
