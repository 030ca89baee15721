"""Blocks that choose their scale by all of their elements, of which a rank may own a part: nvfp4 with four over six."""

import itertools

import numpy as np
import pytest
import torch

from tests import casts
from tests.sharded import Cut, Sharded, Weight, expected
from tests.workers import Ranks
from zerocast import CastPlan, get_format
from zerocast.cast.cut_blocks import cut_rows_of
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats.layout import Span, exchange_unit

MAE, MSE = "nvfp4:four_over_six=mae", "nvfp4:four_over_six=mse,scale_max=448"
SHAPE = (48, 64)
UNIT = 16 * SHAPE[1]


def spans(*ends: int) -> tuple[Cut, ...]:
    return tuple(itertools.pairwise((0, *ends, SHAPE[0] * SHAPE[1])))


CUTS = {
    "between rows of blocks": spans(UNIT, 2 * UNIT),
    "between rows": spans(UNIT + 5 * 64, 2 * UNIT + 15 * 64),
    "in a row of a block": spans(7 * 64 + 21, 2 * UNIT + 3 * 64 + 40),
    "one block in three": spans(UNIT + 64 + 3, UNIT + 9 * 64 + 8),
    "a rank within one row of one block": spans(UNIT + 3 * 64 + 33, UNIT + 3 * 64 + 37),
    "a rank with nothing": spans(UNIT + 11, UNIT + 11),
    "a gap in a block": ((0, UNIT + 100), (UNIT + 2 * 64 + 7, 2 * UNIT + 9), (2 * UNIT + 9, 3 * UNIT)),
}


def complaints(cases: tuple[Weight, ...]) -> list[str]:
    here = Sharded(cases, torch.distributed.get_rank())
    plan = CastPlan(here.weights, here.masters, here.starts)
    plan.cast()
    wrong = []
    for case, weight in zip(cases, here.weights, strict=True):
        wanted, found = expected(case), casts.bytes_of(weight)
        names = [name for name in ("rowwise_scale_inv", "amax") if not np.array_equal(wanted[name], found[name])]
        wrong += [f"{name} of {case}" for name in names]
    return wrong


def test_every_rank_has_the_scales_of_the_unsharded_cast(ranks: Ranks) -> None:
    """Of bf16 weights alone, and beside FP32 ones, with which elements are exchanged in FP32."""
    cases = tuple(
        Weight(fmt, SHAPE, cut, content=content, seed=seed)
        for fmt in (MAE, MSE)
        for cut in CUTS.values()
        for seed, content in enumerate(("normal", "wide", "nan", "inf"))
    )
    mixed = (*cases[::3], Weight(MSE, SHAPE, CUTS["one block in three"], torch.float32, "normal"))
    for some in (cases, mixed):
        assert ranks(3)(complaints, some) == [[]] * 3


@pytest.mark.parametrize("scale_max", [256, 448])
def test_both_choices_are_made(scale_max: int) -> None:
    """The cases above can fail: with one choice for all blocks the bytes are others."""
    fmt = get_format("nvfp4", four_over_six="mse", scale_max=scale_max)
    weight = casts.cast_whole(str(fmt), torch.randn(160, 160))
    master = torch.randn(160, 160)
    plan = CastPlan([weight], [master.view(-1)], [0], ONE_PROCESS)
    plan.cast()
    chosen = plan.packed.buffer < 0
    assert chosen.any() and not chosen.all()
    assert weight.amax is not None and torch.equal(weight.amax, master.bfloat16().float().abs().max().view(1))


def test_rows_of_blocks_that_ends_lie_in() -> None:
    assert exchange_unit(get_format(MAE), 64) == UNIT and exchange_unit(get_format("nvfp4"), 64) == 2
    rows = cut_rows_of("w", 10, [0, 10, 25, 21, 30, 47], offset=5)
    assert [(row.span, row.offset) for row in rows] == [(Span(20, 30), 5), (Span(40, 50), 15)]
