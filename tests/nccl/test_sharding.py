"""Sharding is invisible in the bits on GPUs too: plans over NCCL against the function that knows no shard."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import sharded
from tests.casts import FORMATS, NOMINAL
from tests.devices import gpu_params, gpus
from tests.sharded import Weight
from tests.strategies import models
from zerocast import get_format

pytestmark = gpus(2)
BACKENDS = ["reference", *gpu_params()]
CASE_SECONDS = 120.0  # the first one compiles Triton's kernels


def every_format(world: int, seed: int) -> tuple[Weight, ...]:
    """A weight of every format and nominal dtype, cut after an odd element, the parts with the ranks in any order."""
    draw, cases = random.Random(seed), []
    for fmt in FORMATS:
        for nominal in NOMINAL:
            row, column = get_format(fmt).multiple
            shape = 147 // row * row, 77 // column * column
            numel = shape[0] * shape[1]
            inner = sorted(2 * draw.randrange(numel // 2) + 1 for _ in range(world - 1))
            spans = list(zip([0, *inner], [*inner, numel], strict=True))
            draw.shuffle(spans)
            cases.append(Weight(fmt, shape, tuple(spans), nominal, seed=draw.randrange(1000)))
    return tuple(cases)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2])
def test_every_format_in_one_plan(gpu_ranks, world, backend, seed):
    cases = every_format(world, seed)
    outcomes = gpu_ranks(world)(sharded.cast_and_gather, cases, backend, 1, "cuda", timeout=CASE_SECONDS)
    for rank, outcome in enumerate(outcomes):
        sharded.assert_unsharded(outcome, cases, f"rank {rank} of {world}")


@pytest.mark.parametrize("world", [1, 2])
@settings(max_examples=30)
@given(data=st.data())
def test_any_cut_of_any_mix(gpu_ranks, world, data):
    cases = data.draw(models(world))
    outcomes = gpu_ranks(world)(sharded.cast_and_gather, cases, None, 1, "cuda", timeout=CASE_SECONDS)
    for rank, outcome in enumerate(outcomes):
        sharded.assert_unsharded(outcome, cases, f"rank {rank} of {world}")
