"""Time of `plan.cast()` with 1,024 weights of 64x64 beside 8 weights of the same total size, in flat buffers and scattered.

The elements are the same, so what the many cost beyond the few is host work a tensor. At most twice is promised for flat buffers.
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch

import zerocast
from zerocast.cast.flat_buffer import into_flat_buffer
from zerocast.formats.layout import BUFFERS

FORMATS = ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4", "identity")
MANY, FEW = (1024, (64, 64)), (8, (1024, 512))


def plan_of(count: int, shape: tuple[int, int], fmt: str, flat: bool) -> zerocast.CastPlan:
    """A plan over `count` weights, all owned by this process; `flat` puts masters and every buffer kind into one tensor each."""
    weights = [zerocast.QuantizedWeight.empty(shape, fmt) for _ in range(count)]
    masters = torch.randn(count, shape[0] * shape[1])
    if flat:
        for name in BUFFERS:
            into_flat_buffer([weight for weight in weights if weight.state.buffers[name] is not None], name)
        return zerocast.CastPlan(weights, list(masters), [0] * count)
    return zerocast.CastPlan(weights, [master.clone() for master in masters], [0] * count)


def milliseconds(run: Callable[[], None], repeats: int) -> float:
    """Median time of a call, after a warm-up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)


def measure(repeats: int) -> list[dict[str, float | str]]:
    """One row a format: milliseconds of a cast of the few, of the many, and of the many scattered."""
    rows: list[dict[str, float | str]] = []
    for fmt in FORMATS:
        few = milliseconds(plan_of(*FEW, fmt, flat=True).cast, repeats)
        many = milliseconds(plan_of(*MANY, fmt, flat=True).cast, repeats)
        scattered = milliseconds(plan_of(*MANY, fmt, flat=False).cast, repeats)
        rows.append({"format": fmt, "few_ms": few, "many_ms": many, "ratio": many / few, "scattered_ms": scattered})
    return rows


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure(options.repeats)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'format':<12}{'8 weights':>12}{'1,024 flat':>12}{'ratio':>8}{'1,024 scattered':>18}")
    for row in rows:
        times = f"{row['few_ms']:>9.2f} ms{row['many_ms']:>9.2f} ms{row['ratio']:>8.2f}{row['scattered_ms']:>15.2f} ms"
        print(f"{row['format']:<12}{times}")


if __name__ == "__main__":
    main()
