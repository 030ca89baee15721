"""`make bench`: `zerocast bench` where there is a GPU, its report among the dated ones; else the benchmarks of the CPU."""

import runpy
import sys
from pathlib import Path

import torch

from zerocast.cli import main

REPORTS = Path(__file__).parent / "reports"
OF_THE_CPU = ("cpu_stages", "plan_host_time", "fsdp2_refresh", "step_memory")

if __name__ == "__main__":
    if torch.cuda.is_available():
        sys.exit(main(["bench", "--out", str(REPORTS), *sys.argv[1:]]))
    for name in OF_THE_CPU:
        print(f"\n== {name}", flush=True)
        sys.argv = [name]
        runpy.run_module(f"tests.benchmarks.{name}", run_name="__main__")
