"""Plans among up to 2,048 ranks: who owns what is found without lists of spans, and what is wrong on one rank is named on all."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.simulated import Simulated, simulate
from tests.selection import worlds
from zerocast import QuantizedWeight
from zerocast.cast.partition import Partition, partition
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.ownership import Item, Ownership, Piece, exchange_spans
from zerocast.formats.layout import Span

MANY = 2048
WORLDS = (2, 3, 4)


@functools.cache
def weight(fmt: str, rows: int = 32, columns: int = 32) -> QuantizedWeight:
    """Return a weight that all ranks share, since nothing here writes it."""
    return QuantizedWeight.empty((rows, columns), fmt)


@dataclass
class Passed:
    """The arguments of one rank to a plan, which a case spoils on some ranks. Every weight is cut at multiples
    of two elements.
    """

    rank: int
    world: int
    weights: list[QuantizedWeight] = field(init=False)
    spans: list[tuple[int, int]] = field(init=False)
    dtype: torch.dtype = torch.float32
    what: str = "builds a CastPlan"

    def __post_init__(self) -> None:
        self.weights = [weight("nvfp4"), weight("fp8_block", 32, 160), weight("mxfp8"), weight("fp8_current", 4, 4)]
        self.spans = [self.cut(one.numel()) for one in self.weights]

    def cut(self, numel: int) -> tuple[int, int]:
        """Return this rank's part of a weight. Many ranks have no part of a small one."""
        first, last = (numel // 2 * rank // self.world * 2 for rank in (self.rank, self.rank + 1))
        return first, last

    def build(self, group: Simulated) -> Partition:
        """Make the first steps of building a plan."""
        if self.what != "builds a CastPlan":
            validate_across_ranks(group, [], None, self.what)
        masters: list[Tensor | None] = [torch.empty(stop - start, dtype=self.dtype) for start, stop in self.spans]
        return partition(group, self.weights, masters, [start for start, _ in self.spans], None, "cpu")


def built(
    world: int, spoil: Callable[[Passed], object], spoilt: Sequence[int]
) -> tuple[list[Any], list[tuple[str, int]]]:
    """Return the partition or the error of every rank when some ranks pass something else, and the collectives."""

    def run(group: Simulated) -> Partition:
        passed = Passed(group.rank, group.size)
        if group.rank in spoilt:
            spoil(passed)
        return passed.build(group)

    return simulate(world, run)


def another_weight(passed: Passed) -> None:
    passed.weights[2] = weight("fp8_current", 32, 32)


def a_weight_less(passed: Passed) -> None:
    passed.weights.pop(), passed.spans.pop()


def another_dtype(passed: Passed) -> None:
    passed.dtype = torch.float64


def overlap(passed: Passed) -> None:
    """Take what one of the first ranks has of the smallest weight, of which this rank has nothing."""
    passed.spans[3] = (0, 2)


def overlap_and_gap(passed: Passed) -> None:
    """Take the elements of rank 0 in place of this rank's, so that their number stays right."""
    passed.spans[1] = Passed(0, passed.world).spans[1]


def everything_everywhere(passed: Passed) -> None:
    """Claim all elements of every weight."""
    passed.spans = [(0, one.numel()) for one in passed.weights]


def another_call(passed: Passed) -> None:
    passed.what = "loads a state"


# spoil, error, its text; {last} is the rank that is spoilt
MISTAKES: dict[str, tuple[Callable[[Passed], None], type[Exception], str]] = {
    "another weight": (
        another_weight,
        ValueError,
        "weight 2 is mxfp8 (32, 32) torch.bfloat16 on rank 0 and fp8_current",
    ),
    "a weight less": (a_weight_less, ValueError, "rank 0 passes 4 weights and rank {last} 3"),
    "a problem": (
        another_dtype,
        TypeError,
        "rank {last}: weight 0 (nvfp4 (32, 32) torch.bfloat16): the master is torch.float64",
    ),
    "overlap": (
        overlap,
        ValueError,
        "own elements of weight 3 (fp8_current (4, 4) torch.bfloat16) from 0 on",
    ),
    "overlap and gap": (overlap_and_gap, ValueError, "ranks 0 and {last} both own elements of weight 1"),
    "everything everywhere": (everything_everywhere, ValueError, "ranks 0 and 1 both own elements of weight 0"),
    "another call": (another_call, RuntimeError, "rank 0 builds a CastPlan, rank {last} loads a state"),
}


# What grew with the ranks would be more than is allowed with 256 of them.
CASES = [
    (256, "another weight"),
    *((world, mistake) for world in WORLDS for mistake in MISTAKES),
    *(pytest.param(MANY, mistake, marks=pytest.mark.slow) for mistake in MISTAKES),
]


@pytest.mark.parametrize(("world", "mistake"), CASES)
def test_a_mistake_on_one_rank_is_named_on_all(world: int, mistake: str) -> None:
    spoil, kind, text = MISTAKES[mistake]
    spoilt = min(1777, world - 1)
    found, log = built(world, spoil, range(world) if spoil is everything_everywhere else [spoilt])
    text, named = text.format(last=spoilt), "ranks 0 and 1 " if spoil is everything_everywhere else str(spoilt)
    assert {(type(error), str(error)) for error in found} == {(type(found[0]), str(found[0]))}
    assert type(found[0]) is kind and text in str(found[0]) and named in str(found[0]), found[0]
    assert len(log) < 8
    assert max(nbytes for _, nbytes in log) < 1000, "what goes round does not grow with the ranks"
    if spoil is everything_everywhere:
        assert ("all-gather", 24) in log, "the spans of the first weight show what is wrong"


@pytest.mark.parametrize("world", worlds(2, 3, 4, slow=[MANY]))
def test_three_small_collectives(world: int) -> None:
    """Three collectives suffice with more ranks than elements, too, of which some own nothing."""
    found, log = built(world, id, [])
    assert [kind for kind, _ in log] == ["max", "sum", "max"]
    assert max(nbytes for _, nbytes in log) < 300
    assert {tuple(one.ownership.owned) for one in found} == {(1024, 5120, 1024, 16)}
    assert not any(one.ownership.pieces for one in found)
    assert all(one.ownership.covers(index) for one in found for index in range(4))


def exchanged(spans_by_rank: Sequence[Sequence[Span]], items: Sequence[Item]) -> Ownership:
    """Return the ownership that every rank finds, which must be the same on all."""
    found, _ = simulate(len(spans_by_rank), lambda group: exchange_spans(group, items, spans_by_rank[group.rank]))
    assert all(one == found[0] for one in found), found
    assert isinstance(found[0], Ownership), found[0]
    return found[0]


def test_what_ranks_exchange() -> None:
    """Ranks exchange the odd ends of packed items, and all spans of items with gaps. An item without owner has none."""
    items = [Item(16, 2, "packed"), Item(16, 1, "bytes"), Item(16, 1, "gaps"), Item(16, 1, "nobody's")]
    nothing = Span(0, 0)
    spans = [
        [Span(4, 7), Span(0, 3), Span(8, 9), nothing],
        [Span(0, 4), Span(3, 16), nothing, nothing],
        [Span(7, 16), nothing, Span(1, 4), nothing],
    ]
    found = exchanged(spans, items)
    assert found.owned == [16, 16, 4, 0]
    assert found.pieces == {0: [Piece(4, 7, 0), Piece(7, 16, 2)], 2: [Piece(1, 4, 2), Piece(8, 9, 0)]}
    assert [found.spans(index) for index in range(4)] == [[Span(0, 16)], [Span(0, 16)], [Span(1, 4), Span(8, 9)], []]
