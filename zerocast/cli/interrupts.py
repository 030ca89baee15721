"""Ctrl-C on the command line: one line, exit code 130, and no partly written file.

Before a command runs there is nothing to undo, and a KeyboardInterrupt inside an import may surface
as any error, so Ctrl-C ends the process immediately. During a command the first Ctrl-C raises
KeyboardInterrupt, and the command removes partly written files; further ones are ignored, as they
would interrupt that cleanup. After GRACE_SECONDS the process ends in any case. A process that calls
a command without being the command line keeps its handler.
"""

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

STATUS = 128 + signal.SIGINT
GRACE_SECONDS = 10.0
# Seconds until a KeyboardInterrupt that a finaliser has swallowed is raised again.
AGAIN_SECONDS = 0.01
LINE = "zerocast: interrupted"

# True from the start of the command line of this process to its end.
_owns_process = False
# The time of the first Ctrl-C of the current command, by the monotonic clock.
_first: float | None = None
# True once LINE was written for the current command.
_printed = False


def was_interrupted() -> bool:
    """Return True if Ctrl-C was pressed during a command, even if a library turned it into another
    error.
    """
    return _first is not None


def install_handler() -> None:
    """Let Ctrl-C end this process, which is the command line, until a command runs."""
    global _owns_process  # noqa: PLW0603
    _owns_process = True
    if _ours_to_handle(signal.default_int_handler):
        signal.signal(signal.SIGINT, _end)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Let the first Ctrl-C in the body raise KeyboardInterrupt; restore the handler afterwards."""
    global _first, _printed
    _first, _printed = None, False
    if not _ours_to_handle(signal.default_int_handler, _end):
        yield
        return
    previous_handler = signal.signal(signal.SIGINT, _raise)
    previous_hook = sys.unraisablehook
    sys.unraisablehook = functools.partial(_lost, previous_hook)
    try:
        yield
    finally:
        if was_interrupted():
            _end_after_grace()
        sys.unraisablehook = previous_hook
        signal.signal(signal.SIGINT, previous_handler)


def ignore_signals() -> None:
    """Ignore Ctrl-C once the command has ended, and reset the record of earlier ones.

    A Ctrl-C while Python cleans up would kill the process and so change the exit status.
    """
    # The handler may still be `_raise`, if Ctrl-C was pressed while the handler was being
    # installed.
    if _owns_process and _ours_to_handle(_end, _raise, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if was_interrupted() and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
    # If a KeyboardInterrupt has left the exec of a string, which dataclasses use, Python remembers
    # it and ends `python -m` by a signal. Running another string makes it forget.
    eval("0")  # noqa: S307


def _raise(*_: object) -> None:
    global _first  # noqa: PLW0603
    now = time.monotonic()
    if _first is None:
        _first = now
        # A library may catch the error and continue.
        _end_after_grace()
        raise KeyboardInterrupt
    if now - _first > GRACE_SECONDS:
        _end()


def _lost(previous_hook: Callable[[Any], object], unraisable: Any) -> None:
    """Handle an error that Python cannot raise. A KeyboardInterrupt inside a finaliser is raised
    again soon; Python would only print a traceback and continue.
    """
    if not (was_interrupted() and issubclass(unraisable.exc_type, KeyboardInterrupt)):
        previous_hook(unraisable)
    elif _owns_process and hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _raise_again)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)


def _raise_again(*_: object) -> NoReturn:
    _end_after_grace()
    raise KeyboardInterrupt


def _end_after_grace() -> None:
    if _owns_process and hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _end)
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)


def _end(*_: object) -> NoReturn:
    print_line()
    os._exit(STATUS)


def print_line() -> None:
    """Write the line to stderr, once for a command."""
    global _printed  # noqa: PLW0603
    if not _printed:
        _printed = True
        os.write(2, f"{LINE}\n".encode())


def print_error(line: str) -> None:
    """Print an error of a command, or raise KeyboardInterrupt if Ctrl-C was its cause."""
    if was_interrupted():
        raise KeyboardInterrupt
    sys.stderr.write(f"{line}\n")


def _ours_to_handle(*handlers: object) -> bool:
    """Return True if this is the main thread and SIGINT has one of these handlers. A background job
    has a different handler, which ignores the signal, and keeps it.
    """
    return threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) in handlers
