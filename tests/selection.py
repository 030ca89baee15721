"""The choice of the parameters that run every time. The others are slow tests, so that the sum of time stays small."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import settings


def worlds(*always: int, slow: Iterable[int]) -> list[Any]:
    """Return rank counts: those of every run, and those of the slow tests."""
    return [*always, *(pytest.param(world, marks=pytest.mark.slow) for world in slow)]


def some(cases: Mapping[str, Any], *always: str) -> list[Any]:
    """Return all cases by name. Those not named in `always` are slow."""
    assert {*always} <= {*cases}
    marks = {name: () if name in always else (pytest.mark.slow,) for name in cases}
    return [pytest.param(case, id=name, marks=marks[name]) for name, case in cases.items()]


def examples_on(world: int) -> settings:
    """Return the profile's number of examples divided by the ranks, which share the same processors."""
    return settings(max_examples=max(1, settings().max_examples // world))
