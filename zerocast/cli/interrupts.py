"""Ctrl-C on the command line: one line, exit status 130, and no partly written file.

The first Ctrl-C of a command raises KeyboardInterrupt, and the command removes what it has partly
written. A library may turn that into another error, or catch it, so it is remembered. Further ones
are ignored, since they would interrupt the cleanup; after GRACE_SECONDS they end the process.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

STATUS = 128 + signal.SIGINT
GRACE_SECONDS = 10.0
LINE = "zerocast: interrupted"

# The time of the first Ctrl-C of the current command, by the monotonic clock.
_first: float | None = None


def was_interrupted() -> bool:
    """Return True if Ctrl-C was pressed during the current command, or the last one."""
    return _first is not None


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Remember a Ctrl-C in the body, which is a command.

    A thread keeps its handler, and so do a background job, which ignores the signal, and a program
    that has its own.
    """
    global _first  # noqa: PLW0603
    _first = None
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _press(*_: object) -> None:
    global _first  # noqa: PLW0603
    if _first is None:
        _first = time.monotonic()
        raise KeyboardInterrupt
    if time.monotonic() - _first > GRACE_SECONDS:
        print_line()
        os._exit(STATUS)


def print_line() -> None:
    """Write the line to stderr."""
    os.write(2, f"{LINE}\n".encode())


def print_error(line: str) -> None:
    """Print an error of a command, or raise KeyboardInterrupt if Ctrl-C was its cause."""
    if was_interrupted():
        raise KeyboardInterrupt
    sys.stderr.write(f"{line}\n")
