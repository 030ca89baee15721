"""Observers of a piece of code: what it logs, debug mode, and whether results are the same on all ranks."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

import zerocast


@contextlib.contextmanager
def debug_mode() -> Iterator[None]:
    """While the context is open, zerocast is in debug mode."""
    zerocast.set_debug(True)
    try:
        yield
    finally:
        zerocast.set_debug(False)


def same_on_all(value: Any) -> Any:
    """Assert that the value is the same on all ranks, and return it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(other == value for other in values), values
    return value


@contextlib.contextmanager
def logged(name: str = "zerocast") -> Iterator[list[str]]:
    """Collect the warnings of a logger and of those below it. Lesser messages that a process logs once, such
    as the path of its products, would depend on the tests before.
    """
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)
