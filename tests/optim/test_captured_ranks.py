"""Captured steps on several GPUs, NCCL's collectives in the graph: the bits of ordinary steps."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from tests.optim.replayed import Case, compare
from tests.optim.test_captured import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]


def on_a_gpu_each(case: Case) -> int:
    """The comparison over NCCL."""
    torch.cuda.set_device(dist.get_rank())
    group = dist.new_group(backend="nccl")
    try:
        return compare(dataclasses.replace(case, device="cuda"), group)
    finally:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_replaying_equals_stepping(ranks, case):
    """Every captured step frees its graph before the group goes."""
    assert ranks(2)(on_a_gpu_each, case, timeout=180.0) == [1, 1]
