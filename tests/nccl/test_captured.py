"""Captured steps on GPUs, NCCL's collectives in the graph: the bits of ordinary steps."""

import dataclasses

import pytest
import torch

from tests.devices import worlds_of_gpus
from tests.fsdp2 import test_captured as under_fsdp2
from tests.fsdp2.models import FORMATS
from tests.optim.captured_runs import compare
from tests.optim.test_captured import CASES, graphs_after_a_move

pytestmark = pytest.mark.parametrize("world", worlds_of_gpus(1, 2))
SECONDS = 180.0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_replaying_equals_stepping(gpu_ranks, world, case):
    """The result of the comparison is the number of skipped steps."""
    assert gpu_ranks(world)(compare, dataclasses.replace(case, device="cuda"), timeout=SECONDS) == [1] * world


def test_storage_that_moves_on_the_last_rank(gpu_ranks, world):
    """That one steps without a graph once, with the collectives of the others' graphs."""
    others = [[True] * 4] * (world - 1)
    found = gpu_ranks(world)(graphs_after_a_move, "cuda", world - 1, timeout=SECONDS)
    assert found == [*others, [True, False, True, True]]


@pytest.mark.parametrize("keep_codes", [False, True])
@pytest.mark.parametrize("moment_dtype", [torch.float32, "8bit"], ids=str)
def test_replaying_equals_stepping_under_fsdp2(gpu_ranks, world, keep_codes, moment_dtype):
    """Gradients lie elsewhere at every step, and the all-reduce of amaxes is in the graph."""
    found = gpu_ranks(world)(under_fsdp2.compared, keep_codes, FORMATS, moment_dtype, timeout=SECONDS)
    assert found == [["1 graphs, casts {6}, works at 1 addresses"]] * world


def test_what_has_changed_is_recorded_again_under_fsdp2(gpu_ranks, world):
    assert gpu_ranks(world)(under_fsdp2.after_changes, timeout=SECONDS) == [[2] * len(under_fsdp2.CHANGES)] * world


def test_what_has_changed_on_the_last_rank_under_fsdp2(gpu_ranks, world):
    found = gpu_ranks(world)(under_fsdp2.after_changes, under_fsdp2.OF_ONE_RANK, [world - 1], timeout=SECONDS)
    assert found == [*[[1, 1, 1]] * (world - 1), [2, 2, 2]]
