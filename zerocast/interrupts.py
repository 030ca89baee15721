"""Ctrl-C on the command line: one line, exit code 130, and nothing half-written.

This module is imported before everything else, since `import torch` alone takes a second. Before a
command runs there is nothing to undo, and a KeyboardInterrupt inside an import may surface as any
error, so Ctrl-C ends the process at once. During a command the first Ctrl-C raises
KeyboardInterrupt, and the command removes what it began to write; further ones are ignored, as they
would interrupt that cleanup. After GRACE_SECONDS the process ends in any case. A process that is
not the command line keeps its own handler.
"""

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

STATUS = 128 + signal.SIGINT
GRACE_SECONDS = 10.0
AGAIN_SECONDS = 0.01  # until a KeyboardInterrupt that a finaliser has swallowed is raised again
LINE = "zerocast: interrupted"

_first: float | None = None  # when the first Ctrl-C came
_said = False


def came() -> bool:
    """True if Ctrl-C was pressed during a command, even if a library turned it into another
    error.
    """
    return _first is not None


def end_at_once() -> None:
    """Make Ctrl-C end this process, if it is the command line and no other handler is installed."""
    if COMMAND_LINE and _ours_to_handle(signal.default_int_handler, _raise):
        signal.signal(signal.SIGINT, _end)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Let the first Ctrl-C in the body raise KeyboardInterrupt; restore the handler afterwards."""
    global _first, _said
    _first, _said = None, False
    if not _ours_to_handle(signal.default_int_handler, _end):
        yield
        return
    before = signal.signal(signal.SIGINT, _raise), sys.unraisablehook
    sys.unraisablehook = functools.partial(_lost, sys.unraisablehook)
    try:
        yield
    finally:
        if came():
            _end_after_grace()
        sys.unraisablehook = before[1]
        signal.signal(signal.SIGINT, before[0])


def over() -> None:
    """Ignore Ctrl-C once the command has ended, and forget those that came.

    While Python cleans up it would kill the process and so change the exit status.
    """
    # _raise: Ctrl-C may come while that handler is being installed
    if COMMAND_LINE and _ours_to_handle(_end, _raise, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if came() and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
    # Python remembers a KeyboardInterrupt that has left the exec of a string, as dataclasses have,
    # and ends `python -m` by a signal then. The next string makes it forget.
    eval("0")  # noqa: S307


def _raise(*_: object) -> None:
    global _first  # noqa: PLW0603
    now = time.monotonic()
    if _first is None:
        _first = now
        _end_after_grace()  # a library may take the error for itself
        raise KeyboardInterrupt
    if now - _first > GRACE_SECONDS:
        _end()


def _lost(before: Callable[[Any], object], unraisable: Any) -> None:
    """Raise a KeyboardInterrupt again that came within a finaliser, of which Python would print a
    traceback and go on.
    """
    if not (came() and issubclass(unraisable.exc_type, KeyboardInterrupt)):
        before(unraisable)
    elif COMMAND_LINE and hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _raise_again)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)


def _raise_again(*_: object) -> NoReturn:
    _end_after_grace()
    raise KeyboardInterrupt


def _end_after_grace() -> None:
    if COMMAND_LINE and hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _end)
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)


def _end(*_: object) -> NoReturn:
    say()
    os._exit(STATUS)


def say() -> None:
    """Write the line to stderr, once in the life of the process."""
    global _said  # noqa: PLW0603
    if not _said:
        _said = True
        os.write(2, f"{LINE}\n".encode())


def complain(line: str) -> None:
    """Print an error of a command, or raise KeyboardInterrupt if Ctrl-C was its cause."""
    if came():
        raise KeyboardInterrupt
    sys.stderr.write(f"{line}\n")


def _ours_to_handle(*handlers: object) -> bool:
    """True in the main thread if SIGINT has one of these handlers; a background job ignores it."""
    return threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) in handlers


def _is_command_line() -> bool:
    """True if this process was started as `zerocast` or as `python -m zerocast`."""
    if sys.argv[0] == "-m":
        return sys.orig_argv[-len(sys.argv)] == "zerocast"
    return Path(sys.argv[0]).stem == "zerocast"


COMMAND_LINE = _is_command_line()  # at import: Python rewrites sys.argv before it runs the module
end_at_once()
