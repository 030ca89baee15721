"""Sharding is invisible in the bits: any ranks, cuts, formats and values against the function that knows no shard."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import casts
from tests.casts import CONTENTS, Weight
from tests.selection import examples_on, worlds
from tests.strategies import models
from tests.workers import Ranks


@pytest.mark.parametrize("world", worlds(1, 3, 5, slow=[2]))
def test_any_cut_of_any_mix(ranks: Ranks, world: int) -> None:
    @examples_on(world)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        cases, backend = data.draw(models(world)), data.draw(st.sampled_from(["reference", None]))
        for rank, outcome in enumerate(ranks(world)(casts.cast_and_gather, cases, backend)):
            casts.assert_unsharded(outcome, cases, f"rank {rank}")

    check()


@pytest.mark.shows(host="CastPlan", parallel="data", formats=casts.FORMATS)
@pytest.mark.parametrize("world", worlds(2, slow=(1, 3, 4, 5)))
def test_every_format_in_one_plan(ranks: Ranks, world: int, seed: int) -> None:
    cases = casts.every_format(world, seed)
    for rank, outcome in enumerate(ranks(world)(casts.cast_and_gather, cases)):
        casts.assert_unsharded(outcome, cases, f"rank {rank} of {world}")


@pytest.mark.parametrize("nominal", casts.NOMINAL)
def test_two_owners_of_a_byte(ranks: Ranks, backend: str, nominal: torch.dtype) -> None:
    """Both owners of a byte at an odd NVFP4 boundary write the same byte, for all special values
    next to it.
    """
    cuts = (0, 1, 2, 5, 259, 16 * 32)
    spans = tuple(zip(cuts, cuts[1:], strict=False))
    cases = tuple(Weight("nvfp4", (16, 32), spans, nominal, content, seed) for content in CONTENTS for seed in (2, 3))
    for rank, outcome in enumerate(ranks(5)(casts.cast_and_gather, cases, backend)):
        casts.assert_unsharded(outcome, cases, f"rank {rank}")
