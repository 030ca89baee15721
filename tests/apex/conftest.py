"""Ranks on which Apex runs: over gloo on the CPU with stubs, over NCCL on GPUs with its compiled extensions."""

import functools
from typing import Any

import pytest
import torch

from tests.apex.host_on_cpu import MISSING
from tests.workers import Ranks


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def host_ranks(request: pytest.FixtureRequest) -> Ranks:
    """`host_ranks(world)(function, *args)`: the results, by rank."""
    on_gpus: bool = request.param == "gpu"
    if on_gpus and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if on_gpus and MISSING:
        pytest.skip(f"Apex is built without {', '.join(MISSING)}")
    pools: Ranks = request.getfixturevalue("gpu_ranks" if on_gpus else "ranks")

    def of(world: int) -> functools.partial[list[Any]]:
        if on_gpus and torch.cuda.device_count() < world:
            pytest.skip(f"needs {world} CUDA devices, there are {torch.cuda.device_count()}")
        return functools.partial(pools(world), timeout=180.0)

    return of
