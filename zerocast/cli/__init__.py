"""The command line: `zerocast <command>`, also as `python -m zerocast <command>`.

Each command is a module. Commands need the packages of the extra `cli`, which the library itself
never imports.

Ctrl-C prints one line, gives the exit status 130, and leaves no partly written file. The first
Ctrl-C of a command raises KeyboardInterrupt, and the command removes what it has partly written. A
library may turn that into another error, or catch it, so it is remembered. Further ones are
ignored, since they would interrupt the cleanup; after GRACE_SECONDS they end the process.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from zerocast.cli.app import find

# The exit status after a Ctrl-C.
INTERRUPTED = 128 + signal.SIGINT
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
        os._exit(INTERRUPTED)


def print_line() -> None:
    """Write the line to stderr."""
    os.write(2, f"{LINE}\n".encode())


def print_error(line: str) -> None:
    """Print an error of a command, or raise KeyboardInterrupt if Ctrl-C was its cause."""
    if was_interrupted():
        raise KeyboardInterrupt
    sys.stderr.write(f"{line}\n")


# The exit status if the reader of the output is gone.
NO_READER = 128 + signal.SIGPIPE
# The packages of the extra `cli` that every command needs. safetensors, the third one, is imported
# only to read or write such files.
EXTRA = ("matplotlib", "tyro")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default the one of the process's command line. Returns the exit status,
    which is 130 after a Ctrl-C and 141 if the reader of the output is gone.
    """
    try:
        with remembered():
            status = _run(arguments)
        # If a library has caught the KeyboardInterrupt, the command ends as usual.
        if not was_interrupted():
            return status
    except BrokenPipeError:
        # The reader has ended, as `| head` does. Python flushes stdout when it ends, which would
        # raise once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except BaseException as error:
        if not (was_interrupted() or isinstance(error, KeyboardInterrupt)):
            raise
    print_line()
    return INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    try:
        status = find(arguments).parsed()()
        sys.stdout.flush()
        return status
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        print(f"the command line needs {package}: pip install 'zerocast[cli]'", file=sys.stderr)
        return 2
