"""Hypothesis for a while: examples until the time is over, the failing one made small as ever."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

LENGTHS = [0.4, pytest.param(60.0, marks=pytest.mark.slow)]  # seconds
A_SECOND = 150  # examples; those that are drawn after the end cost next to nothing
SAID = (TypeError, ValueError, RuntimeError)  # what a public call may raise


def fuzz(seconds: float, cases: SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Check drawn cases, at least one."""
    end, count = time.monotonic() + seconds, 0

    @settings(max_examples=int(seconds * A_SECOND), suppress_health_check=list(HealthCheck), database=None)
    @given(cases)
    def run(case: Any) -> None:
        nonlocal count
        if not count or time.monotonic() < end:
            count += 1
            check(case)

    run()


def refuses(call: Callable[[], Any]) -> str | None:
    """Return the message of an error that the call is allowed to raise, or None. Other errors
    propagate.
    """
    try:
        call()
    except SAID as error:
        said = str(error)
        assert said.strip(), f"a {type(error).__name__} without a message"
        return said
    return None
