"""Row: a line of the report before it is measured, with its work and workload."""

import difflib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zerocast.bench import work
from zerocast.bench.traffic import Traffic
from zerocast.bench.workload import B_FLAT, B_SCATTERED, A, BenchEnv, C, Job, Workload
from zerocast.formats import get_format

Build = Callable[[Workload, str, BenchEnv], Job]


@dataclass(frozen=True)
class Work:
    """A piece of work.

    Attributes:
        name: the name in the names of rows.
        build: sets the work up for a workload, a format and an environment.
        moved: the bytes that any implementation must read and write.
        summary: a line of explanation.
    """

    name: str
    build: Build
    moved: Callable[[Traffic], int]
    summary: str


@dataclass(frozen=True)
class Row:
    """One work on one workload in one format; `clock` is the time that the row reports."""

    workload: Workload
    work: Work
    fmt: str
    clock: Literal["device", "wall"] = "device"

    @property
    def name(self) -> str:
        """The name in tables and stored reports, which does not depend on the scale."""
        return f"{self.workload.name.partition('/')[0]} {self.work.name} {self.fmt}".strip()

    @property
    def moved(self) -> int:
        """The least number of bytes read plus written."""
        return self.work.moved(Traffic(self.workload, get_format(self.fmt or "identity")))


def _work(attribute: str, name: str, summary: str) -> Work:
    """Return the work whose job `work.<attribute>` makes, and whose bytes are in `Traffic`."""
    return Work(name, getattr(work, attribute), operator.attrgetter(attribute), summary)


CAST = _work("cast", "cast", "partial amaxes, scales of all weights, codes of the shard: CastPlan.cast()")
CAST_OF_OWN_SCALES = _work(
    "cast_of_own_scales", "cast of own scales", "the same where scales are gathered with the codes, as by ZeroAdamW"
)
PARTIAL_AMAX = _work("partial_amax", "partial_amax", "the amaxes of the shard only")
COMPUTE_SCALES = _work("compute_scales", "compute_scales", "the scales of all weights only")
PARTIAL_CAST = _work("partial_cast", "partial_cast", "the codes of the shard only")
AMAX_AND_CAST = _work("amax_and_cast", "amax and cast", "the two stages that follow the shard")
TRANSPOSE = _work("transpose", "transpose", "columnwise copies of all weights, once gathered")
UPCAST = _work("upcast", "upcast", "E4M3 operands of 4-bit weights, for a product")
UPCAST_TRANSPOSED = _work("upcast_transposed", "upcast transposed", "the same for the transposed weights")
ADAM = _work("adam", "Adam", "AdamW on the shard, without a cast")
ADAM_8BIT = _work(
    "adam_8bit", "8-bit Adam", "the same with moments in 8 bits, with amaxes, and with codes of local scales"
)
QUANTIZE_GRADIENT = _work(
    "quantize_gradient", "quantize gradient", "FP8 codes and scales of a bucket's gradients, as they are sent"
)
ADD_GRADIENTS = _work("add_gradients", "add gradients", "the sum of such messages in FP32")
STEP = _work("step", "whole step", "AdamW with amaxes and codes of local scales in one pass, then other codes")
STEP_IN_TWO_PASSES = _work(
    "step_in_two_passes",
    "two-pass step",
    "the same if all codes wait for reduced amaxes, as codes of shared blocks do",
)

FORMATS = ("fp8_block", "fp8_current", "mxfp8", "mxfp8:block=32x32", "mxfp4", "nvfp4", "int4")
EXACT = "nvfp4:exact_in_fp8"


def all_rows() -> Iterator[Row]:
    """Yield the rows of the report at full size, in its order."""
    for fmt in (*FORMATS, EXACT):
        yield Row(A, CAST, fmt)
    yield Row(A, CAST_OF_OWN_SCALES, "mxfp8")
    yield Row(A, ADAM, "")
    yield Row(A, ADAM_8BIT, "fp8_current")
    yield Row(A, QUANTIZE_GRADIENT, "")
    yield Row(A, ADD_GRADIENTS, "")
    for fmt in ("nvfp4", "fp8_block", "mxfp8:block=32x32", "mxfp4"):
        yield Row(A, ADAM_8BIT, fmt)
        yield Row(A, STEP, fmt)
        if get_format(fmt).casts_in_one_pass:
            yield Row(A, STEP_IN_TWO_PASSES, fmt)
            yield Row(C, STEP, fmt)
    for workload in (B_FLAT, B_SCATTERED):
        yield from (Row(workload, CAST, fmt, "wall") for fmt in FORMATS)
    for fmt in FORMATS:
        # A rank of C owns an eighth of the elements that a rank of A owns of the same weights.
        yield from (Row(workload, AMAX_AND_CAST, fmt) for workload in (A, C))
    for fmt in ("fp8_block", "fp8_current", "nvfp4"):
        yield Row(A, TRANSPOSE, fmt)
    for fmt in ("mxfp4", EXACT):
        yield Row(A, UPCAST, fmt)
        yield Row(A, UPCAST_TRANSPOSED, fmt)
    for fmt in FORMATS:
        yield from (Row(A, stage, fmt) for stage in (PARTIAL_AMAX, COMPUTE_SCALES, PARTIAL_CAST))


def select(only: Sequence[str], scale: int) -> list[Row]:
    """Return the rows whose names contain one of `only`, or all rows, on workloads shrunk by
    `scale`. Raises ValueError for a text that no name contains.
    """
    rows = list(all_rows())
    for text in only:
        if not any(text in row.name for row in rows):
            raise ValueError(f"no row is called {text!r}: {_suggestion(text, rows)}")
    selected = {row.name for row in rows if not only or any(text in row.name for text in only)}
    return [replace(row, workload=row.workload.scaled(scale)) for row in rows if row.name in selected]


def _suggestion(text: str, rows: Sequence[Row]) -> str:
    names = {name for row in rows for name in (row.name, row.work.name, row.fmt) if name}
    close_matches = difflib.get_close_matches(text, sorted(names), n=3)
    if close_matches:
        return f"did you mean {', '.join(close_matches)}?"
    works = dict.fromkeys(row.work.name for row in rows)
    return f"names are workload, work and format, as in {rows[0].name!r}; works are {', '.join(works)}"
