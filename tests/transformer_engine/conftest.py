"""Tests in this process, on one rank."""

from collections.abc import Iterator

import pytest

from tests.transformer_engine.host_on_cpu import WHY_NOT, host_on_cpu


@pytest.fixture
def te() -> Iterator[None]:
    """TransformerEngine can be imported in the test."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with host_on_cpu():
        yield
