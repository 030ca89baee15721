"""Products on the CPU as on tensor cores."""

from collections.abc import Iterator

import pytest

from zerocast import gemm


@pytest.fixture
def scaled_mm() -> Iterator[None]:
    with gemm.use("scaled_mm"):
        yield
