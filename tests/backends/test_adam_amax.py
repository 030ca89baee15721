"""Stage adam_amax: on every backend the bytes of the reference's update, then partial_amax, and nothing else written."""

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
from tests.backends.test_adam_update import scalars
from tests.sharded import Weight
from tests.tables import Bench
from zerocast.backends import reference
from zerocast.backends.descriptor import Column
from zerocast.backends.reference.adam import adamw

BF16, FP32 = torch.bfloat16, torch.float32
WITH_AMAX = [fmt for fmt in casts.FORMATS if not fmt.startswith("identity")]
FIELDS = ("masters", "grads", "exp_avgs", "exp_avg_sqs")


@dataclass(frozen=True)
class Case:
    """A table of weights of one format, and how gradients and moments are stored."""

    bench: Bench
    seed: int
    grad: torch.dtype = FP32
    moment: torch.dtype = FP32
    clip: float = 1.0

    def inputs(self) -> dict[str, Any]:
        """Fresh copies of all that the stage is given."""
        rng = np.random.default_rng(self.seed)
        masters = self.bench.arenas["master"].bases()

        def noise(dtype: torch.dtype) -> list[Tensor]:
            return [torch.from_numpy(rng.standard_normal(t.numel(), np.float32)).to(dtype) for t in masters]

        groups = torch.from_numpy(rng.integers(0, 3, len(self.bench.weights)))
        squares = [t.square() for t in noise(self.moment)]
        state = dict(zip(FIELDS, (masters, noise(self.grad), noise(self.moment), squares), strict=True))
        return state | {"groups": groups, "packed": self.bench.packed(reduced=False)}

    def run(self, backend: str, skip: Tensor | None = None) -> dict[str, Any]:
        """The stage in one call; all that it was given, afterwards."""
        given = self.inputs()
        rows, clip = torch.from_numpy(scalars()), torch.tensor([self.clip])
        state = (given[name] for name in FIELDS)
        stage, table = devices.stage(backend, "adam_amax"), self.bench.table
        stage(self.bench.fmt, self.bench.nominal, *state, table, given["groups"], rows, clip, given["packed"], skip)
        return given

    def composed(self) -> dict[str, Any]:
        """The same by the two stages of the reference, weight by weight."""
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
        return given


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """One to five weights of one format, whole, cut anywhere or not owned."""
    model, nominal = draw(st.sampled_from(WITH_AMAX)), draw(st.sampled_from(casts.NOMINAL))
    weights = []
    for _ in range(draw(st.integers(1, 5))):
        shape = draw(strategies.shapes(model))
        spans = draw(strategies.cuts(shape, draw(st.sampled_from([1, 2, 3, 5]))))
        content, seed = draw(st.sampled_from(strategies.SPECIAL)), draw(st.integers(0, 2**31))
        weights.append(Weight(model, shape, spans, nominal, content, seed))
    grad, moment = draw(st.sampled_from([FP32, BF16])), draw(st.sampled_from([FP32, BF16]))
    bench = Bench(tuple(weights), draw(st.integers(0, 2**31)))
    return Case(bench, draw(st.integers(0, 2**31)), grad, moment, draw(st.sampled_from([1.0, 0.3])))


def words(tensor: Tensor) -> NDArray[Any]:
    """Bit patterns, with all NaN alike."""
    return casts.raw(torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor))


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in FIELDS:
        for index, (a, b) in enumerate(zip(found[name], expected[name], strict=True)):
            assert np.array_equal(words(a), words(b)), f"{name}, base {index}"
    casts.assert_same_bytes({"f": casts.raw(found["packed"])}, {"f": casts.raw(expected["packed"])}, "packed")


def test_update_then_amax(any_backend: str) -> None:
    """Guards between the weights are compared too: only owned elements change."""

    @strategies.examples(any_backend)
    @given(case=cases(), threads=st.integers(1, 3))
    def check(case: Case, threads: int) -> None:
        with devices.threads(threads):
            assert_same(case.run(any_backend, torch.tensor([False])), case.composed())

    check()


@pytest.mark.long_interpreted
@pytest.mark.long_at_every_level
@pytest.mark.parametrize("turned", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fmt", [fmt for fmt in strategies.LARGE if fmt != "identity"])
def test_large_weights(variant: str, fmt: str, turned: bool, seed: int) -> None:
    """Larger than the pieces that a backend cuts its work into: each element is updated once all the same."""
    rows, columns = strategies.large(fmt, variant)[:: -1 if turned else 1]
    numel = rows * columns
    weight = Weight(fmt, (rows, columns), ((0, numel),), content="wide", seed=seed)
    bench = Bench((weight, replace(weight, spans=((numel // 3, numel - min(1001, numel // 3)),))), seed)
    case = Case(bench, seed, BF16, BF16 if turned else FP32, 0.3)
    assert_same(case.run(variant), case.composed())


def test_skip_writes_nothing(any_backend: str) -> None:
    weights = Weight("fp8_block", (256, 128), ((0, 256 * 128),)), Weight("fp8_block", (128, 64), ((0, 128 * 64),))
    case = Case(Bench(weights, 1), 1)
    assert_same(case.run(any_backend, torch.tensor([True])), case.inputs())
