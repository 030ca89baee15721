"""Sharding is invisible in the bits on GPUs too: plans over NCCL against the function that knows no shard."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import casts
from tests.casts import FORMATS, every_format
from tests.devices import gpu_params, gpus
from tests.strategies import models

pytestmark = gpus(2)
BACKENDS = ["reference", *gpu_params()]
CASE_SECONDS = 120.0  # the first one compiles Triton's kernels


@pytest.mark.shows(host="CastPlan", parallel="data", formats=FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2])
def test_every_format_in_one_plan(gpu_ranks, world, backend, seed):
    cases = every_format(world, seed)
    outcomes = gpu_ranks(world)(casts.cast_and_gather, cases, backend, 1, "cuda", timeout=CASE_SECONDS)
    for rank, outcome in enumerate(outcomes):
        casts.assert_unsharded(outcome, cases, f"rank {rank} of {world}")


@pytest.mark.parametrize("world", [1, 2])
@settings(max_examples=30)
@given(data=st.data())
def test_any_cut_of_any_mix(gpu_ranks, world, data):
    cases = data.draw(models(world))
    outcomes = gpu_ranks(world)(casts.cast_and_gather, cases, None, 1, "cuda", timeout=CASE_SECONDS)
    for rank, outcome in enumerate(outcomes):
        casts.assert_unsharded(outcome, cases, f"rank {rank} of {world}")
