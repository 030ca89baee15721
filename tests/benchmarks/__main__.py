"""`make bench`: every benchmark of the CPU, one after the other, tables on the screen."""

import runpy
import sys

BENCHMARKS = ("cpu_stages", "plan_host_time", "step_memory")

if __name__ == "__main__":
    for name in BENCHMARKS:
        print(f"\n== {name}", flush=True)
        sys.argv = [name]
        runpy.run_module(f"tests.benchmarks.{name}", run_name="__main__")
