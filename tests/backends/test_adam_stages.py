"""Stages adam_amax, adam_cast and adam_8bit_cast: on every backend the bytes of the reference's update, partial_amax and
partial_cast one after the other, and nothing else written.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests import casts, devices, strategies
from tests.backends.stages import Bench
from tests.backends.test_adam_update import scalars
from tests.casts import Weight
from zerocast import get_format
from zerocast.backends import reference
from zerocast.backends.descriptor import Column, Piece
from zerocast.backends.reference.adam import adamw
from zerocast.formats.layout import Span, moment_groups, whole_block_rows

BF16, FP32 = torch.bfloat16, torch.float32
FIELDS = ("masters", "grads", "exp_avgs", "exp_avg_sqs")
# every kind of block that is cast in one pass, and every element and rule of scales with it
ONE_PASS = [
    *(fmt for fmt in casts.FORMATS if get_format(fmt).casts_in_one_pass),
    *("fp8_block:element=e5m2", "fp8_block:power_of_2_scale=False", "fp8_block:amax_epsilon=0.01"),
    *("mxfp8:block=32x32", "mxfp4", "mxfp4:exact_in_fp8=False", "mxfp4:scale_rounding=floor"),
]


@dataclass(frozen=True)
class Case:
    """A table of weights of one format, and how gradients and moments are stored, for adam_amax."""

    bench: Bench
    seed: int
    grad: torch.dtype = FP32
    moment: torch.dtype = FP32
    clip: float = 1.0
    wild: bool = False  # gradients and moments are drawn by bit pattern

    def inputs(self) -> dict[str, Any]:
        """Fresh copies of all that the stage is given."""
        rng = np.random.default_rng(self.seed)
        masters = self.bench.arenas["master"].bases()

        def noise(dtype: torch.dtype) -> list[Tensor]:
            sizes = [master.numel() for master in masters]
            drawn = (
                [casts.bit_patterns(size, int(rng.integers(2**31))) for size in sizes]
                if self.wild
                else [rng.standard_normal(size, np.float32) for size in sizes]
            )
            return [torch.from_numpy(values).to(dtype) for values in drawn]

        groups = torch.from_numpy(rng.integers(0, 3, len(self.bench.weights)))
        squares = [t.abs() if self.wild else t.square() for t in noise(self.moment)]
        state = dict(zip(FIELDS, (masters, noise(self.grad), noise(self.moment), squares), strict=True))
        return state | {"groups": groups, "packed": self.bench.packed(reduced=False)}

    def run(self, backend: str, skip: Tensor | None = None) -> dict[str, Any]:
        """Run the stage once, and return its inputs by name, as the stage has left them."""
        given = self.inputs()
        rows, clip = torch.from_numpy(scalars()), torch.tensor([self.clip])
        stage, state = devices.stage(backend, self.stage), [given[name] for name in FIELDS]
        written = [given["packed"], *([given["row_data"]] if "row_data" in given else [])]
        stage(self.bench.fmt, self.bench.nominal, *state, self.bench.table, given["groups"], rows, clip, *written, skip)
        return given

    @property
    def stage(self) -> str:
        return "adam_amax"

    def composed(self) -> dict[str, Any]:
        """The same by the stages of the reference, the update weight by weight."""
        given = self.inputs()
        for line, group in zip(self.bench.table.tolist(), given["groups"].tolist(), strict=True):
            if line[Column.NUMEL]:
                own = slice(line[Column.MASTER_OFFSET], line[Column.MASTER_OFFSET] + line[Column.NUMEL])
                p, g, m, v = (given[name][line[Column.MASTER_BASE]][own] for name in FIELDS)
                row, clip = torch.from_numpy(scalars())[group], torch.tensor([self.clip])
                new = adamw(p, g.float(), m.float(), v.float(), row, clip)
                for kept, value in zip((p, m, v), new, strict=True):
                    kept.copy_(value)
        fmt, nominal = self.bench.fmt, self.bench.nominal
        reference.partial_amax(fmt, nominal, given["masters"], self.bench.table, given["packed"])
        return self._cast(given)

    def _cast(self, given: dict[str, Any]) -> dict[str, Any]:
        return given


@dataclass(frozen=True)
class OnePass(Case):
    """Owned spans are whole block rows, and adam_cast writes their codes too."""

    def inputs(self) -> dict[str, Any]:
        return super().inputs() | {"row_data": self.bench.arenas["row_data"].bases()}

    @property
    def stage(self) -> str:
        return "adam_cast"

    def _cast(self, given: dict[str, Any]) -> dict[str, Any]:
        of_table = given["packed"], [], [], given.get("table", self.bench.table), given["row_data"], [], None
        reference.partial_cast(self.bench.fmt, self.bench.nominal, given["masters"], *of_table)
        return given


@dataclass(frozen=True)
class EightBit(OnePass):
    """By adam_8bit_cast, with codes and scales of moments that begin as random bytes and numbers."""

    def inputs(self) -> dict[str, Any]:
        given = super().inputs()
        rng = np.random.default_rng(self.seed + 1)
        # A row that owns nothing has no piece.
        owned = self.bench.table[:, Column.NUMEL] > 0
        table, groups = self.bench.table[owned], given.pop("groups")[owned]
        pieces, counts = [], [0] * len(given["masters"])
        for line, group in zip(table.tolist(), groups.tolist(), strict=True):
            base, start, numel = line[Column.MASTER_BASE], line[Column.START], line[Column.NUMEL]
            row = [0] * len(Piece)
            row[Piece.BASE], row[Piece.OFFSET], row[Piece.NUMEL] = base, line[Column.MASTER_OFFSET], numel
            row[Piece.SCALARS], row[Piece.START], row[Piece.COLUMNS] = group, start, line[Column.COLUMNS]
            row[Piece.SCALE], row[Piece.KEY] = counts[base], int(rng.integers(2**32))
            row[Piece.CUT_FIRST] = row[Piece.CUT_LAST] = -1
            counts[base] += moment_groups(start, numel, line[Column.COLUMNS])
            pieces.append(row)
        for row in pieces:
            row[Piece.SECOND_SCALE] = row[Piece.SCALE] + counts[row[Piece.BASE]]
        sizes = [master.numel() for master in given["masters"]]
        given["exp_avgs"] = [torch.from_numpy(rng.integers(-127, 128, n).astype(np.int8)) for n in sizes]
        given["exp_avg_sqs"] = [torch.from_numpy(rng.integers(0, 256, n).astype(np.uint8)) for n in sizes]
        given["moment_scales"] = [torch.from_numpy(rng.random((2, n), np.float32)) for n in counts]
        return given | {"table": table, "pieces": torch.tensor(pieces, dtype=torch.int64).view(-1, len(Piece))}

    def run(self, backend: str, skip: Tensor | None = None) -> dict[str, Any]:
        given = self.inputs()
        state = [given[name] for name in (*FIELDS, "moment_scales", "table", "pieces")]
        written = given["packed"], given["row_data"]
        stage = devices.stage(backend, "adam_8bit_cast")
        stage(self.bench.fmt, self.bench.nominal, *state, *self._of_step(), *written, skip)
        return given

    def _of_step(self) -> tuple[Tensor, Tensor, Tensor]:
        return torch.from_numpy(scalars()), torch.tensor([self.clip]), torch.tensor([4, 9, 4])

    def composed(self) -> dict[str, Any]:
        given = self.inputs()
        stage, no_cuts = devices.stage("reference", "adam_8bit"), torch.zeros(2, 0)
        for row, piece in zip(given["table"], given["pieces"], strict=True):
            # The tensors of one base alone.
            base, alone, piece_alone = int(piece[Piece.BASE]), row[None].clone(), piece[None].clone()
            alone[0, Column.MASTER_BASE] = piece_alone[0, Piece.BASE] = 0
            state = [[given[name][base]] for name in (*FIELDS, "moment_scales")]
            of_step = *self._of_step(), given["packed"], no_cuts, False, None
            stage(self.bench.fmt, self.bench.nominal, *state, alone, piece_alone, *of_step)
        return self._cast(given)


KINDS = (Case, OnePass, EightBit)
WITH_CODES = (OnePass, EightBit)


def words(tensor: Tensor) -> NDArray[Any]:
    """Bit patterns, with all NaN alike."""
    return casts.raw(torch.where(tensor.isnan(), torch.nan, tensor) if tensor.is_floating_point() else tensor)


def assert_same(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    casts.assert_same_bytes({"packed": words(found["packed"])}, {"packed": words(expected["packed"])}, what)
    for name in (*FIELDS, "moment_scales", "row_data"):
        for index, (a, b) in enumerate(zip(found.get(name, ()), expected.get(name, ()), strict=True)):
            casts.assert_same_bytes({name: words(a)}, {name: words(b)}, f"{what}, base {index}")


@st.composite
def whole_rows(draw: st.DrawFn, fmt: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Some of the block rows of a matrix, or none."""
    height = (get_format(fmt).exchange_block or (1, 1))[0]
    edges = [*range(0, shape[0], height), shape[0]]
    first, last = sorted(draw(st.lists(st.sampled_from(edges), min_size=2, max_size=2)))
    return first * shape[1], last * shape[1]


@st.composite
def cases(draw: st.DrawFn, kind: type[Case]) -> Case:
    """A few weights of one format, whole, cut or not owned: anywhere for adam_amax, else between block rows."""
    formats = ONE_PASS if kind in WITH_CODES else [fmt for fmt in casts.FORMATS if fmt != "identity"]
    fmt, nominal = draw(st.sampled_from(formats)), draw(st.sampled_from(casts.NOMINAL))
    row, column = get_format(fmt).multiple
    weights = []
    for _ in range(draw(st.integers(1, 3))):
        if kind in WITH_CODES:
            shape: Any = (row * draw(st.integers(1, 320 // row)), column * draw(st.integers(1, 160 // column)))
            spans: Any = (draw(whole_rows(fmt, shape)),)
        else:
            shape = draw(strategies.shapes(fmt))
            spans = draw(strategies.cuts(shape, draw(st.sampled_from([1, 2, 3, 5]))))
        content, seed = draw(st.sampled_from(strategies.SPECIAL)), draw(st.integers(0, 2**31))
        weights.append(Weight(fmt, shape, spans, nominal, content, seed))
    grad, moment = draw(st.sampled_from([FP32, BF16])), draw(st.sampled_from([FP32, BF16]))
    bench = Bench(tuple(weights), draw(st.integers(0, 2**31)), kind in WITH_CODES and draw(st.booleans()))
    clip, wild = draw(st.sampled_from([1.0, 0.3])), draw(st.booleans())
    return kind(bench, draw(st.integers(0, 2**31)), grad, moment, clip, wild)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_one_stage_after_the_other(any_backend: str, kind: type[Case]) -> None:
    """Guards between the weights are compared too: only what is owned changes."""

    @strategies.examples(any_backend)
    @given(case=cases(kind), threads=st.integers(1, 3))
    def check(case: Case, threads: int) -> None:
        with devices.threads(threads):
            assert_same(case.run(any_backend, torch.tensor([False])), case.composed(), str(case.bench.weights))

    check()


SLOW = pytest.mark.slow
LARGE = [
    *(
        pytest.param(Case, fmt, turned, marks=SLOW if turned else ())
        for fmt in strategies.LARGE
        for turned in (False, True)
        if fmt != "identity"
    ),
    *(
        pytest.param(kind, fmt, turned, marks=SLOW if turned or (kind is EightBit and fmt != "fp8_block") else ())
        for kind in WITH_CODES
        for fmt in ("fp8_block", "mxfp8:block=32x32", "mxfp4")
        for turned in (False, True)
    ),
]


@pytest.mark.long_interpreted
@pytest.mark.long_at_every_level
@pytest.mark.parametrize(("kind", "fmt", "turned"), LARGE)
def test_large_weights(variant: str, kind: type[Case], fmt: str, turned: bool, seed: int) -> None:
    """Larger than the pieces that a backend cuts its work into: each element is updated once all the same. A second weight is
    owned in part.
    """
    rows, columns = strategies.large(fmt.partition(":")[0], variant)
    first, last = rows * columns // 3, rows * columns - min(1001, rows * columns // 3)
    if kind in WITH_CODES:
        block = (get_format(fmt).exchange_block or (1, 1))[0]
        # An odd number of tiles of 128 columns: the thread blocks of adam_8bit_cast take two.
        rows, columns = max(96, block + 32), 416 if strategies.is_interpreted(variant) else 32 * 524
        first, last = block * (rows if turned else columns), rows * columns
    shape = (columns, rows) if turned else (rows, columns)
    weight = Weight(fmt, shape, ((0, rows * columns),), content="wide", seed=seed)
    bench = Bench((weight, replace(weight, spans=((first, last),))), seed)
    case = kind(bench, seed, BF16, BF16 if turned else FP32, 0.3)
    assert_same(case.run(variant), case.composed(), fmt)


@pytest.mark.parametrize("kind", KINDS)
def test_skip_writes_nothing(any_backend: str, kind: type[Case]) -> None:
    weights = Weight("fp8_block", (256, 128), ((0, 256 * 128),)), Weight("fp8_block", (128, 64), ((0, 128 * 64),))
    case = kind(Bench(weights, 1), 1)
    assert_same(case.run(any_backend, torch.tensor([True])), case.inputs(), "skipped")


@pytest.mark.parametrize("kind", WITH_CODES)
@pytest.mark.parametrize("span", [(1, 128 * 96), (0, 128 * 96 - 1), (32 * 96, 160 * 96)])
def test_a_span_that_cuts_a_block_is_refused(any_backend: str, span: tuple[int, int], kind: type[Case]) -> None:
    """Its codes would come from amaxes of one rank; nothing is written."""
    case = kind(Bench((Weight("mxfp4", (160, 96), (span,)),), 1), 1)
    with pytest.raises(ValueError, match=f"row 0: elements {span[0]} to {span[1]} of 160x96 cut a block"):
        case.run(any_backend)


@pytest.mark.parametrize("kind", WITH_CODES)
@pytest.mark.parametrize("fmt", ["fp8_current", "fp8_delayed", "mxfp8", "nvfp4"])
def test_formats_whose_scales_are_not_local_are_refused(any_backend: str, fmt: str, kind: type[Case]) -> None:
    case = kind(Bench((Weight(fmt, (32, 64), ((0, 2048),)),), 1), 1)
    with pytest.raises(ValueError, match="depend on more than their own blocks"):
        case.run(any_backend)


@given(data=st.data(), fmt=st.sampled_from(ONE_PASS))
def test_whole_rows_of_a_span(data: st.DataObject, fmt: str) -> None:
    """By element: those of the block rows of which every element is in the span, and no others."""
    spec = get_format(fmt)
    assert spec.exchange_block
    rows, columns = spec.multiple[0] * data.draw(st.integers(1, 9)), spec.multiple[1] * data.draw(st.integers(1, 3))
    start, stop = sorted(data.draw(st.lists(st.integers(0, rows * columns), min_size=2, max_size=2)))
    unit = spec.exchange_block[0] * columns
    expected = [
        element
        for first in range(0, rows * columns, unit)
        if start <= first and min(first + unit, rows * columns) <= stop
        for element in range(first, min(first + unit, rows * columns))
    ]
    whole = whole_block_rows(spec, (rows, columns), Span(start, stop))
    assert [*range(whole.start, whole.stop)] == expected
    assert start <= whole.start <= whole.stop <= stop
