"""The benchmark of the CPU's stages gives every backend arguments that it can take."""

import pytest
import torch

from tests.benchmarks.cpu_stages import Weights
from zerocast import get_format
from zerocast.backends import cpu, reference


@pytest.mark.parametrize("fmt", ["fp8_block", "fp8_current", "fp8_delayed", "mxfp8", "nvfp4"])
def test_scales_of_both_backends(fmt: str) -> None:
    master = torch.randn(2 * 128 * 256)
    found = []
    for backend in (cpu, reference):
        weights = Weights(get_format(fmt), master, 128, 256)
        weights.partial_amax(backend)
        weights.compute_scales(backend)
        found.append((weights.row_scale, weights.column_scale, weights.amax))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
