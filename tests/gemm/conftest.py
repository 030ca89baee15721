"""Products on the CPU as on tensor cores."""

from collections.abc import Iterator

import pytest

from tests.gemm.scaled_mm import emulated
from zerocast import gemm
from zerocast.gemm import torch_api


@pytest.fixture
def scaled_mm() -> Iterator[None]:
    """Products are those of FP8 operands, by torch's own emulation."""
    with gemm.use("scaled_mm"):
        yield


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What paths hand to torch's `scaled_mm` is checked and multiplied in FP32."""
    monkeypatch.setattr(torch_api, "scaled_mm", emulated)
