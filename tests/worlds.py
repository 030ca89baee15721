"""Numbers of ranks that a test is run with, and what their sum of time allows."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def worlds(*always: int, slow: Iterable[int]) -> list[Any]:
    """Test parameters: the rank counts of every run, and those of the slow tests beside them."""
    return [*always, *(pytest.param(world, marks=pytest.mark.slow) for world in slow)]


def examples_on(world: int) -> settings:
    """The profile's number of examples divided by the ranks: each takes as many times longer on the same processors."""
    return settings(max_examples=max(1, settings().max_examples // world))
