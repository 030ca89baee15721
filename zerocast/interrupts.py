"""Ctrl-C on the command line: one line, exit code 130, and nothing half-written.

This module is imported before everything else, since `import torch` alone takes a second. Until a command runs there is nothing to
take back, and a KeyboardInterrupt in the middle of an import may come out as any error: the process ends at once. Within a command
the first Ctrl-C raises KeyboardInterrupt, and what was begun is removed. More of them would interrupt that. After GRACE_SECONDS
the process ends in any case. A process that is not the command line keeps its own handler.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

STATUS = 128 + signal.SIGINT
GRACE_SECONDS = 10.0
LINE = "zerocast: interrupted"

_first: float | None = None  # when the first Ctrl-C came
_said = False


def came() -> bool:
    """Whether Ctrl-C was pressed while a command ran, also where a library made another error of it."""
    return _first is not None


def end_at_once() -> None:
    """From here on Ctrl-C ends this process, if it is the command line and nobody else handles the signal."""
    if _COMMAND_LINE and _ours_to_handle(signal.default_int_handler, _raise):
        signal.signal(signal.SIGINT, _end)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Within, Ctrl-C raises KeyboardInterrupt, once; afterwards it does what it did before."""
    global _first, _said
    _first, _said = None, False
    if not _ours_to_handle(signal.default_int_handler, _end):
        yield
        return
    before = signal.signal(signal.SIGINT, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def over() -> None:
    """The command has ended: Ctrl-C while Python cleans up would kill the process, and its status would be another one."""
    if _COMMAND_LINE and _ours_to_handle(_end, _raise, signal.default_int_handler):  # _raise: it came as that was set
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if came() and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)


def _raise(*_: object) -> None:
    global _first  # noqa: PLW0603
    now = time.monotonic()
    if _first is None:
        _first = now
        if _COMMAND_LINE and hasattr(signal, "setitimer"):  # a finaliser or a library may take the error for itself
            signal.signal(signal.SIGALRM, _end)
            signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)
        raise KeyboardInterrupt
    if now - _first > GRACE_SECONDS:
        _end()


def _end(*_: object) -> NoReturn:
    """End without any cleanup."""
    say()
    os._exit(STATUS)


def say() -> None:
    """The one line, once."""
    global _said  # noqa: PLW0603
    if not _said:
        _said = True
        os.write(2, f"{LINE}\n".encode())


def complain(line: str) -> None:
    """Print an error of a command; KeyboardInterrupt where Ctrl-C came, of which a library has made that error."""
    if came():
        raise KeyboardInterrupt
    sys.stderr.write(f"{line}\n")


def _ours_to_handle(*handlers: object) -> bool:
    """Whether the signal has one of these handlers; a background job ignores it, say."""
    return threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) in handlers


def _is_command_line() -> bool:
    """Whether this process was started as `zerocast` or `python -m zerocast`, of which the package is imported first."""
    if sys.argv[0] == "-m":
        return sys.orig_argv[-len(sys.argv)] == "zerocast"
    return Path(sys.argv[0]).stem == "zerocast"


_COMMAND_LINE = _is_command_line()  # Python changes the arguments before it runs the module
end_at_once()
