"""Captured steps on several GPUs, NCCL's collectives in the graph: the bits of ordinary steps."""

import dataclasses

import pytest

from tests.devices import gpus
from tests.fsdp2 import test_captured as under_fsdp2
from tests.optim.replayed import compare
from tests.optim.test_captured import CASES

pytestmark = gpus(2)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_replaying_equals_stepping(gpu_ranks, case):
    """The result of the comparison is the number of skipped steps."""
    assert gpu_ranks(2)(compare, dataclasses.replace(case, device="cuda"), timeout=180.0) == [1, 1]


def test_replaying_equals_stepping_under_fsdp2(gpu_ranks):
    """Gradients lie elsewhere at every step, and the all-reduce of amaxes is in the graph."""
    found = gpu_ranks(2)(under_fsdp2.compared, timeout=180.0)
    assert found == [["1 graphs, casts {6}, works at 1 addresses"]] * 2


def test_what_has_changed_is_captured_again_under_fsdp2(gpu_ranks):
    changes = len(under_fsdp2.CHANGES)
    assert gpu_ranks(2)(under_fsdp2.after_changes, timeout=180.0) == [[" capture the step again"] * changes] * 2
