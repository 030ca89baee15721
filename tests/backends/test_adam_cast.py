"""Stage adam_cast: on every backend the bytes of the reference's update, partial_amax and partial_cast one after the other."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import casts, devices, strategies
from tests.backends.test_adam_amax import BF16, FP32, Case, assert_same
from tests.backends.test_adam_update import scalars
from tests.sharded import Weight
from tests.tables import Bench
from zerocast import get_format
from zerocast.backends import reference
from zerocast.formats.layout import Span, whole_block_rows

# every kind of block that the stage takes, and every element and rule of scales with it
ONE_PASS = [
    *(fmt for fmt in casts.FORMATS if get_format(fmt).casts_in_one_pass),
    *("fp8_block:element=e5m2", "fp8_block:power_of_2_scale=False", "fp8_block:amax_epsilon=0.01"),
    *("mxfp8:block=32x32", "mxfp4", "mxfp4:exact_in_fp8=False", "mxfp4:scale_rounding=floor"),
]


@dataclass(frozen=True)
class OnePass(Case):
    """A table of weights whose owned spans are whole block rows."""

    def inputs(self) -> dict[str, Any]:
        return super().inputs() | {"row_data": self.bench.arenas["row_data"].bases()}

    def run(self, backend: str, skip: Tensor | None = None) -> dict[str, Any]:
        given = self.inputs()
        fmt, table, rows = self.bench.fmt, self.bench.table, torch.from_numpy(scalars())
        state = given["masters"], given["grads"], given["exp_avgs"], given["exp_avg_sqs"]
        adam = given["groups"], rows, torch.tensor([self.clip])
        stage = devices.stage(backend, "adam_cast")
        stage(fmt, self.bench.nominal, *state, table, *adam, given["packed"], given["row_data"], skip)
        return given

    def composed(self) -> dict[str, Any]:
        made = super().composed()
        bench, data = self.bench, self.bench.arenas["row_data"].bases()
        masters = bench.fmt, bench.nominal, made["masters"]
        reference.partial_cast(*masters, made["packed"], [], [], bench.table, data, [], None)
        return made | {"row_data": data}


def assert_same_codes(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert_same(found, expected)
    for index, (a, b) in enumerate(zip(found["row_data"], expected["row_data"], strict=True)):
        casts.assert_same_bytes({"codes": casts.raw(a)}, {"codes": casts.raw(b)}, f"{what}, base {index}")


@st.composite
def whole_rows(draw: st.DrawFn, fmt: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Some of the block rows of a matrix, or none."""
    height = (get_format(fmt).exchange_block or (1, 1))[0]
    edges = [*range(0, shape[0], height), shape[0]]
    first, last = sorted(draw(st.lists(st.sampled_from(edges), min_size=2, max_size=2)))
    return first * shape[1], last * shape[1]


@st.composite
def cases(draw: st.DrawFn) -> OnePass:
    """One to three weights of one format, of which whole block rows are owned."""
    fmt, nominal = draw(st.sampled_from(ONE_PASS)), draw(st.sampled_from(casts.NOMINAL))
    row, column = get_format(fmt).multiple
    weights = []
    for _ in range(draw(st.integers(1, 3))):
        shape = row * draw(st.integers(1, 320 // row)), column * draw(st.integers(1, 288 // column))
        span = draw(whole_rows(fmt, shape))
        content, seed = draw(st.sampled_from(strategies.SPECIAL)), draw(st.integers(0, 2**31))
        weights.append(Weight(fmt, shape, (span,), nominal, content, seed))
    grad, moment = draw(st.sampled_from([FP32, BF16])), draw(st.sampled_from([FP32, BF16]))
    bench = Bench(tuple(weights), draw(st.integers(0, 2**31)), draw(st.booleans()))
    return OnePass(bench, draw(st.integers(0, 2**31)), grad, moment, draw(st.sampled_from([1.0, 0.3])))


def test_update_amax_and_codes(any_backend: str) -> None:
    """Guards between the weights are compared too: only what is owned changes."""

    @strategies.examples(any_backend)
    @given(case=cases(), threads=st.integers(1, 3))
    def check(case: OnePass, threads: int) -> None:
        with devices.threads(threads):
            found = case.run(any_backend, torch.tensor([False]))
            assert_same_codes(found, case.composed(), str(case.bench.weights))

    check()


def large(fmt: str, variant: str, seed: int, turned: bool = False) -> tuple[Weight, Weight]:
    """A weight larger than the pieces that a backend cuts its work into, and one owned from its second block row on."""
    block = (get_format(fmt).exchange_block or (1, 1))[0]
    rows, columns = max(96, block + 32), 416 if strategies.is_interpreted(variant) else 32 * 520
    rows, columns = (columns, rows) if turned else (rows, columns)
    weight = Weight(fmt, (rows, columns), ((0, rows * columns),), content="wide", seed=seed)
    return weight, replace(weight, spans=((block * columns, rows * columns),))


@pytest.mark.long_interpreted
@pytest.mark.long_at_every_level
@pytest.mark.parametrize("turned", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8:block=32x32", "mxfp4"])
def test_large_weights(variant: str, fmt: str, turned: bool, seed: int) -> None:
    bench = Bench(large(fmt, variant, seed, turned), seed)
    case = OnePass(bench, seed, BF16, BF16 if turned else FP32, 0.3)
    assert_same_codes(case.run(variant), case.composed(), fmt)


def test_skip_writes_nothing(any_backend: str) -> None:
    weights = Weight("fp8_block", (256, 128), ((0, 256 * 128),)), Weight("fp8_block", (128, 64), ((0, 128 * 64),))
    case = OnePass(Bench(weights, 1), 1)
    assert_same_codes(case.run(any_backend, torch.tensor([True])), case.inputs(), "skipped")


@pytest.mark.parametrize("span", [(1, 128 * 96), (0, 128 * 96 - 1), (32 * 96, 160 * 96)])
def test_a_span_that_cuts_a_block_is_refused(any_backend: str, span: tuple[int, int]) -> None:
    """Its codes would come from amaxes of one rank; nothing is written."""
    case = OnePass(Bench((Weight("mxfp4", (160, 96), (span,)),), 1), 1)
    with pytest.raises(ValueError, match=f"row 0: elements {span[0]} to {span[1]} of 160x96 cut a block"):
        case.run(any_backend)


@pytest.mark.parametrize("fmt", ["fp8_current", "fp8_delayed", "mxfp8", "nvfp4"])
def test_formats_whose_scales_are_not_local_are_refused(any_backend: str, fmt: str) -> None:
    case = OnePass(Bench((Weight(fmt, (32, 64), ((0, 2048),)),), 1), 1)
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
