"""Captured steps on several GPUs, NCCL's collectives in the graph: the bits of ordinary steps."""

import dataclasses

import pytest

from tests.devices import gpus
from tests.optim.replayed import compare
from tests.optim.test_captured import CASES

pytestmark = gpus(2)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_replaying_equals_stepping(gpu_ranks, case):
    """The result of the comparison is the number of skipped steps."""
    assert gpu_ranks(2)(compare, dataclasses.replace(case, device="cuda"), timeout=180.0) == [1, 1]
