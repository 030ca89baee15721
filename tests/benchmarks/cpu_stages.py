"""The CPU stages against the memory: time, bytes moved, and their rate beside a copy, plain torch and the reference backend.

Bytes are those that a stage must read and write once; the copy is `b.copy_(a)` of as many f32 elements, taken again before each
format, because the bandwidth of a shared machine wanders. "torch" is what one would write without zerocast, on the same numbers
but, where torch has no such thing, not to the same bytes. The reference backend is timed on a sixteenth and scaled.
`--one-thread` is for a machine with other work on it: it counts the time that the one thread ran, copy included.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.stages import row, table
from zerocast import get_format
from zerocast.backends import _C, cpu, reference
from zerocast.backends.descriptor import Piece
from zerocast.formats import AmaxPolicy, Columnwise, FormatSpec, ScaleRule, layout

FORMATS = ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4", "identity")
COLUMNS = 4096
NOMINAL = torch.bfloat16
REFERENCE_SHARE = 16
_ARGS = (1 - 1e-5, 0.9, 0.1, 0.95, 0.05, 1e-3, 0.5, 1e-8)

Run = Callable[[], object]


@dataclass
class Stage:
    """One stage of one format: how to run it, what it moves, and what it stands beside."""

    name: str
    moved: int
    run: Run
    reference: Run | None = None
    plain: Run | None = None


class Weights:
    """Equal weights of one format in flat buffers, wholly owned, and the arguments of every stage on them."""

    def __init__(self, fmt: FormatSpec, master: Tensor, rows: int, columns: int) -> None:
        self.fmt, self.master, self.rows, self.columns = fmt, master, rows, columns
        count = master.numel() // (rows * columns)
        sizes = {name: _numel(buffer) for name, buffer in layout.buffers(fmt, (rows, columns), NOMINAL).items()}
        data = rows * columns * (fmt.bits or 16) // 8
        row_amaxes, column_amaxes = layout.amax_counts(fmt, rows, columns)
        each = row_amaxes + column_amaxes
        has_no_column_grid = fmt.scale_rule is ScaleRule.TWO_LEVEL  # the place is then that of a shared amax
        self.table = table(
            *[
                row(
                    rows=rows, columns=columns, start=0, numel=rows * columns, master_base=0, master_offset=i * rows * columns,
                    row_amax=i * each, column_amax=-1 if has_no_column_grid else i * each + row_amaxes,
                    row_data_base=0, row_data_offset=i * data, column_data_base=0, column_data_offset=i * data,
                    row_scale_base=0, row_scale_offset=i * sizes["rowwise_scale_inv"],
                    column_scale_base=0, column_scale_offset=i * sizes["columnwise_scale_inv"],
                    amax_base=0, amax_offset=i, scale_base=0, scale_offset=i,
                )
                for i in range(count)
            ]
        )  # fmt: skip
        self.packed = torch.zeros(count * each, dtype=torch.bfloat16)
        self.row_scale = torch.zeros(count * sizes["rowwise_scale_inv"], dtype=fmt.scale_dtype)
        self.column_scale = torch.zeros(count * sizes["columnwise_scale_inv"], dtype=fmt.scale_dtype)
        self.row_data, self.column_data = (torch.zeros(count * data, dtype=torch.uint8) for _ in range(2))
        self.amax, self.scale = torch.ones(count), torch.ones(count)

    def partial_amax(self, backend: object) -> None:
        backend.partial_amax(self.fmt, NOMINAL, [self.master], self.table, self.packed)  # type: ignore[attr-defined]

    def compute_scales(self, backend: object) -> None:
        scales = [self.scale] if self.fmt.amax_policy is AmaxPolicy.DELAYED else []
        stored = [self.row_scale], [self.column_scale], [self.amax]
        backend.compute_scales(self.fmt, self.packed, self.table, *stored, scales, None)  # type: ignore[attr-defined]

    def partial_cast(self, backend: object) -> None:
        data = [self.row_data], [self.column_data]
        scales = [self.packed, [self.amax], [self.scale]]
        backend.partial_cast(self.fmt, NOMINAL, [self.master], *scales, self.table, *data, None)  # type: ignore[attr-defined]

    def transpose(self, backend: object) -> None:
        rowwise, columnwise = ([self.row_data], [self.row_scale]), ([self.column_data], [self.column_scale])
        backend.transpose(self.fmt, self.table, *rowwise, *columnwise)  # type: ignore[attr-defined]

    def dequantize(self, backend: object, out: Tensor) -> None:
        buffers = layout.buffers(self.fmt, (self.rows, self.columns), NOMINAL)
        data, scale = buffers["rowwise_data"], buffers["rowwise_scale_inv"]
        assert data and scale
        first = self.row_data[: _numel(data)].view(data.shape), self.row_scale[: _numel(scale)].view(scale.shape)
        shape = self.rows, self.columns
        backend.dequantize(self.fmt, *first, self.amax[:1], *shape, False, out)  # type: ignore[attr-defined]


def _numel(buffer: layout.Buffer | None) -> int:
    return math.prod(buffer.shape) if buffer else 0


def stages_of(big: Weights, small: Weights) -> Iterator[Stage]:
    """The stages of a format; `small` is what the reference runs on."""
    fmt, master = big.fmt, big.master
    tiles = master.view(-1, big.columns)
    amaxes, data = big.packed.numel() * big.packed.itemsize, big.row_data.numel()
    if fmt.amax_policy is not AmaxPolicy.NONE:
        yield Stage(
            "partial_amax", master.nbytes + amaxes, lambda: big.partial_amax(cpu), lambda: small.partial_amax(reference),
            lambda: plain_amax(fmt, tiles),
        )  # fmt: skip
        scales = big.row_scale.nbytes + (big.column_scale.nbytes if fmt.columnwise is Columnwise.OWN_GRID else 0)
        yield Stage(
            "compute_scales", amaxes + scales, lambda: big.compute_scales(cpu), lambda: small.compute_scales(reference)
        )
    codes = data * (2 if fmt.columnwise is Columnwise.OWN_GRID else 1)
    yield Stage(
        "partial_cast", master.nbytes + amaxes + codes, lambda: big.partial_cast(cpu), lambda: small.partial_cast(reference),
        plain_cast(fmt, tiles),
    )  # fmt: skip
    if fmt.columnwise is Columnwise.TRANSPOSE:
        matrix = big.row_data.view(-1, big.rows, data // (master.numel() // big.columns))
        plain = None if fmt.bits == 4 else lambda: matrix.transpose(1, 2).contiguous()
        yield Stage("transpose", 2 * data, lambda: big.transpose(cpu), lambda: small.transpose(reference), plain)
    if fmt.element:
        out = torch.empty(big.rows, big.columns, dtype=NOMINAL)
        moved = out.nbytes + out.numel() * fmt.element.bits // 8
        yield Stage("dequantize (one weight)", moved, lambda: big.dequantize(cpu, out))


def plain_amax(fmt: FormatSpec, x: Tensor) -> Tensor:
    """Amaxes as one would write them in torch."""
    a = x.to(NOMINAL).abs()
    if fmt.block is None:
        return a.amax()
    height, width = fmt.block
    return a.view(x.shape[0] // height, height, x.shape[1] // width, width).amax((1, 3))


def plain_cast(fmt: FormatSpec, x: Tensor) -> Run | None:
    """The cast as one would write it in torch; None where torch has no such element."""
    if fmt.element is None:
        return lambda: x.to(NOMINAL)
    if fmt.bits == 4:
        return None
    block = fmt.block or (x.shape[0], x.shape[1])
    tiles = x.view(x.shape[0] // block[0], block[0], x.shape[1] // block[1], block[1])
    scale = torch.full((tiles.shape[0], 1, tiles.shape[2], 1), 64.0)
    return lambda: (tiles.to(NOMINAL).float() * scale).to(torch.float8_e4m3fn)


def adam(numel: int) -> Stage:
    """adam_step beside torch's fused AdamW."""
    p, g, m, v = (torch.full((numel,), 0.1) for _ in range(4))
    segments, scalars, clip = torch.tensor([[0, numel, 0]]), torch.tensor([_ARGS]), torch.ones(1)
    parameter = torch.nn.Parameter(torch.full((numel,), 0.1))
    parameter.grad = g
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    return Stage(
        "adam_step",
        7 * p.nbytes,
        lambda: cpu.adam_step(p, g, m, v, segments, scalars, clip, None),
        plain=optimizer.step,
    )


def adam_8bit(weights: Weights) -> Stage:
    """adam_8bit, which takes amaxes as well."""
    count, numel = len(weights.table), weights.rows * weights.columns
    groups = layout.moment_groups(0, numel, weights.columns)
    pieces = torch.zeros(count, len(Piece), dtype=torch.int64)
    pieces[:, Piece.OFFSET], pieces[:, Piece.SCALE] = torch.arange(count) * numel, torch.arange(count) * groups
    pieces[:, Piece.SECOND_SCALE] = pieces[:, Piece.SCALE] + count * groups
    pieces[:, Piece.NUMEL], pieces[:, Piece.COLUMNS] = numel, weights.columns
    pieces[:, [Piece.CUT_FIRST, Piece.CUT_LAST]] = -1
    g, scales = torch.randn_like(weights.master), torch.zeros(2, count * groups)
    codes = torch.zeros(count * numel, dtype=torch.int8), torch.zeros(count * numel, dtype=torch.uint8)
    state = [[weights.master], [g], [codes[0]], [codes[1]], [scales]]
    rest = torch.tensor([_ARGS]), torch.ones(1), torch.ones(1, dtype=torch.int64), weights.packed, torch.zeros(2, 0)
    arguments = *state, weights.table, pieces, *rest, False, None
    moved = 3 * g.nbytes + 4 * codes[0].nbytes + 2 * scales.nbytes
    return Stage("adam_8bit", moved, lambda: cpu.adam_8bit(weights.fmt, NOMINAL, *arguments))


def seconds(run: Run, repeats: int) -> float:
    """The best time of a call: what the code takes when nothing else runs."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run()
    best = math.inf
    for _ in range(repeats):
        start = clock()
        run()
        best = min(best, clock() - start)
    return best


def measure(stage: Stage, fmt: str, copy_rate: float, repeats: int) -> dict[str, float | str | None]:
    """One line of the table; rates in GB/s."""
    took = seconds(stage.run, repeats)
    plain = seconds(stage.plain, max(1, repeats // 5)) / took if stage.plain else None
    slow = seconds(stage.reference, 1) * REFERENCE_SHARE / took if stage.reference else None
    rate = stage.moved / took / 1e9
    return {
        "format": fmt, "stage": stage.name, "ms": took * 1e3, "MB": stage.moved / 1e6, "GB/s": rate, "copy GB/s": copy_rate,
        "of copy": rate / copy_rate, "torch / ours": plain, "reference / ours": slow,
    }  # fmt: skip


def show(line: dict[str, float | str | None]) -> None:
    """Print one line of the table."""
    ratios = [f"{value:8.1f}x" if value else f"{'-':>9}" for value in (line["torch / ours"], line["reference / ours"])]
    numbers = f"{line['ms']:9.3f}{line['MB']:9.1f}{line['GB/s']:8.1f}{line['copy GB/s']:8.1f}{line['of copy']:9.0%}"
    print(f"{line['format']:<12} {line['stage']:<24}{numbers} {' '.join(ratios)}", flush=True)


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--numel", type=int, default=1 << 26, help="elements in all, a multiple of --columns times 128 times --weights"
    )
    parser.add_argument("--columns", type=int, default=COLUMNS)
    parser.add_argument("--weights", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--level", choices=_C.simd_levels(), help="instruction set instead of the best")
    parser.add_argument("--one-thread", action="store_true", help="one thread, and only the time that it ran")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.one_thread:
        torch.set_num_threads(1)
    if options.level:
        _C.set_simd_level(options.level)
    rows = options.numel // options.weights // options.columns
    if rows * options.columns * options.weights != options.numel or rows % (128 * REFERENCE_SHARE):
        parser.error(f"{options.numel} elements are not {options.weights} weights of {REFERENCE_SHARE} times 128 rows")
    a = torch.randn(options.numel) * 0.02
    b, lines = torch.empty_like(a), []

    def add(stage: Stage, fmt: str, rate: float) -> None:
        lines.append(measure(stage, fmt, rate, options.repeats))
        if not options.json:
            show(lines[-1])

    if not options.json:
        print(
            f"{torch.get_num_threads()} threads, {_C.simd_level()}, {options.weights} weights of {rows} x {options.columns}"
        )
        heads = f"{'ms':>9}{'MB':>9}{'GB/s':>8}{'copy':>8}{'of copy':>9}{'torch/us':>10}{'ref/us':>10}"
        print(f"{'format':<12} {'stage':<24}{heads}")
    for name in options.formats:
        rate = 2 * a.nbytes / seconds(lambda: b.copy_(a), 5) / 1e9
        big = Weights(get_format(name), a, rows, options.columns)
        small = Weights(get_format(name), a[: a.numel() // REFERENCE_SHARE], rows // REFERENCE_SHARE, options.columns)
        for stage in stages_of(big, small):
            add(stage, name, rate)
    rate = 2 * a.nbytes / seconds(lambda: b.copy_(a), 5) / 1e9
    add(adam(options.numel), "-", rate)
    add(adam_8bit(Weights(get_format("fp8_current"), a, rows, options.columns)), "fp8_current", rate)
    if options.json:
        print(json.dumps(lines, indent=2))


if __name__ == "__main__":
    main()
