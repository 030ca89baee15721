"""What a piece of code logs, and code in debug mode, on any rank."""

import contextlib
import logging
from collections.abc import Iterator

import zerocast


@contextlib.contextmanager
def debug_mode() -> Iterator[None]:
    """Within, zerocast is in debug mode."""
    zerocast.set_debug(True)
    try:
        yield
    finally:
        zerocast.set_debug(False)


@contextlib.contextmanager
def logged(name: str = "zerocast") -> Iterator[list[str]]:
    """The messages that a logger, and those below it, are given within."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)
