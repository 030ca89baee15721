"""Ranks on which Apex runs here: over gloo on the CPU with stubs, over NCCL on GPUs with its compiled extensions."""

import functools

import pytest
import torch

from tests.apex.host_on_cpu import ON_GPU
from tests.workers import Ranks


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def host_ranks(request: pytest.FixtureRequest) -> Ranks:
    """`host_ranks(world)(function, *args)`: the results, by rank."""
    if (request.param == "gpu") != ON_GPU:
        pytest.skip("runs on the GPUs of this machine" if ON_GPU else "no CUDA device")
    pools: Ranks = request.getfixturevalue("gpu_ranks" if ON_GPU else "ranks")
    if not ON_GPU:
        return pools

    def of(world: int) -> functools.partial[list[object]]:
        if torch.cuda.device_count() < world:
            pytest.skip(f"needs {world} CUDA devices, there are {torch.cuda.device_count()}")
        return functools.partial(pools(world), timeout=180.0)

    return of
