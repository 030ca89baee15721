"""Counts of casts: what ranks find on their parts is what plain numpy finds on the whole."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import zerocast
from tests import casts
from tests.casts import matrix
from tests.metrics import numpy_counts
from tests.optim.runs import Run, Trainer
from tests.workers import Ranks
from zerocast import QuantizedWeight, get_format
from zerocast.distributed.group import Group
from zerocast.formats.layout import Span
from zerocast.metrics import CastCounts, CastMeter, owned_part
from zerocast.verification.master_views import MasterView, MasterViews

SHAPE = (160, 160)
FORMATS = (
    "fp8_delayed:amax_history_len=4",
    "fp8_delayed:element=e5m2",
    "fp8_current",
    "fp8_current:element=e5m2",
    "fp8_block",
    "fp8_block:power_of_2_scale=False",
    "mxfp8",
    "nvfp4",
    "int4",
)
CONTENTS = ("wide", "nan", "inf", "steep")
SCALES = {"fp8_delayed:amax_history_len=4": 300.0, "fp8_delayed:element=e5m2": 40000.0}  # too large: they clip


def content_of(content: str, seed: int) -> NDArray[np.float32]:
    if content != "steep":
        return matrix(content, *SHAPE, seed)
    down, across = (np.arange(extent, dtype=np.float32) // 16 for extent in SHAPE)
    fall = np.exp2(-3 * down)[:, None] * np.exp2(-0.22 * across)  # the scales of nvfp4 run out
    return (matrix("normal", *SHAPE, seed) * fall).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A weight of FORMATS and CONTENTS, cast twice."""

    fmt: str
    content: str
    nominal: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.fmt} {self.content} {self.nominal}"

    def masters(self) -> list[NDArray[np.float32]]:
        """Return the masters before and after some elements have moved."""
        first = content_of(self.content, 3)
        moved = np.random.default_rng(4).random(SHAPE) < 0.3
        return [first, np.where(moved, content_of(self.content, 5), first)]

    def weights(self) -> list[QuantizedWeight]:
        scale = SCALES.get(self.fmt, 1.0)
        return [casts.cast_whole(self.fmt, torch.from_numpy(m), self.nominal, scale=scale) for m in self.masters()]

    def span(self, rank: int, ranks: int, number: int) -> Span:
        """Return this rank's part of any cut, odd ones too. Every third weight belongs to one rank alone."""
        size = SHAPE[0] * SHAPE[1]
        cuts = sorted(np.random.default_rng(number).integers(0, size, ranks - 1).tolist())
        cuts = [0, *(cuts if number % 3 else [size] * (ranks - 1)), size]
        return Span(cuts[rank], cuts[rank + 1])


CASES = [
    Case(fmt, content, nominal)
    for number, (fmt, content) in enumerate((fmt, content) for fmt in FORMATS for content in CONTENTS)
    for nominal in [(torch.bfloat16, torch.float32, torch.float16)[number % 3]]
]


class Owner:
    """Masters in arbitrary spans, which no optimizer would choose."""

    def __init__(self) -> None:
        self.group = Group.of(None)
        held = [(case, case.masters(), case.weights()) for case in CASES]
        self.weights = {case.name: weights for case, _, weights in held}
        self.masters = []
        for number, (case, masters, weights) in enumerate(held):
            span = case.span(self.group.rank, self.group.size, number)
            part = torch.from_numpy(masters[1]).view(-1)[span.start : span.stop].clone()
            self.masters.append(MasterView(case.name, weights[0], part if span.numel else None, span))

    def master_views(self) -> tuple[MasterViews, ...]:
        return (MasterViews(self.group, tuple(self.masters)),)

    def cast_again(self) -> None:
        for before, now in self.weights.values():
            for name, tensor in before.state.buffers.items():
                if tensor is not None:
                    tensor.copy_(now.state.buffers[name])


def measured(piece: int) -> tuple[dict[str, CastCounts], dict[str, CastCounts]]:
    """Measure after the second cast, and again with nothing done in between."""
    before, owned_part.PIECE = owned_part.PIECE, piece
    owner = Owner()
    meter = CastMeter(owner)
    owner.cast_again()
    found = meter.measure(), meter.measure()
    owned_part.PIECE = before
    return found


def agrees(found: CastCounts, expected: dict[str, float], what: str) -> None:
    exact = dataclasses.asdict(found)
    for name in ("square_error", "square_sum"):
        assert exact.pop(name) == pytest.approx(expected.pop(name), rel=1e-10, nan_ok=True), (what, name)
    assert exact == expected, what


@pytest.fixture(scope="module")
def expected() -> list[tuple[Case, dict[str, float], dict[str, float]]]:
    """Return the values to find after the second cast, and after a third one that changes nothing."""
    found = []
    for case in CASES:
        master, (before, now) = case.masters()[1], map(numpy_counts.buffers_of, case.weights())
        found.append(
            (case, numpy_counts.counts(case.fmt, master, before, now), numpy_counts.counts(case.fmt, master, now, now))
        )
    return found


@pytest.mark.parametrize(("world", "piece"), [(1, 2**20), (2, 4096), (3, 1000)])
def test_every_count_is_that_of_the_whole_master(ranks: Ranks, expected: Any, world: int, piece: int) -> None:
    by_rank = ranks(world)(measured, piece)
    for found in by_rank:
        assert str(found) == str(by_rank[0])  # all alike, NaN too
    first, again = by_rank[0]
    for case, moved, still in expected:
        agrees(first[case.name], dict(moved), case.name)
        agrees(again[case.name], dict(still), case.name)


def test_parts_add_up_and_become_shares() -> None:
    parts = [CastCounts(100, 1, 2, 3, 40, 9.0, 100.0, 5.0), CastCounts(300, 0, 2, 1, 60, 16.0, 300.0, 7.0)]
    together = CastCounts.together(parts)
    assert together == CastCounts(400, 1, 4, 4, 100, 25.0, 400.0, 7.0)
    assert together.scalars() == {
        "saturated_percent": 1.0,
        "flushed_percent": 1.0,
        "unchanged_percent": 25.0,
        "cast_error": 0.25,
        "amax": 7.0,
        "nonfinite": 1,
    }
    assert CastCounts.together([]).scalars()["cast_error"] == 0.0


@pytest.mark.parametrize(("element", "top"), [("e4m3", 0x7E), ("e5m2", 0x7B)])
def test_where_a_code_type_ends(element: str, top: int) -> None:
    fp8 = get_format(f"fp8_current:element={element}").element
    assert fp8
    assert owned_part.largest_code(fp8) == top
    assert owned_part.overshoot(fp8) * fp8.max == pytest.approx(numpy_counts.LIMITS[element])


def test_a_switch_of_formats_changes_every_code():
    trainer = Trainer(Run())
    meter = CastMeter(trainer.optimizer)
    plain_matrices = {"embedding": "identity", "fp16": "identity"}
    for recipe in ({**plain_matrices, "nv": "fp8_block"}, {**plain_matrices, "nv": "nvfp4", "delayed": "fp8_current"}):
        zerocast.switch(trainer.optimizer, zerocast.Recipe(recipe))
        counts = meter.measure()
        assert counts.keys() == recipe.keys() - plain_matrices.keys()
        assert counts["nv"].unchanged == 0
        assert 0 < counts["nv"].cast_error < 0.2
    assert meter.measure()["nv"].unchanged == counts["nv"].elements
