"""Ctrl-C in the examples: one line, exit code 130, and no process left behind."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

STATUS = 128 + signal.SIGINT


def end_at_once(*_: object) -> None:
    """End the process on Ctrl-C during imports, when there is nothing to clean up yet."""
    os.write(2, b"interrupted\n")
    os._exit(STATUS)


def run(main: Callable[[], object]) -> None:
    """Call `main` and end the process with its exit status, 0 if it returns none, 130 on Ctrl-C."""
    try:
        if signal.getsignal(signal.SIGINT) is end_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the processes of a run have ended by now
        if os.environ.get("RANK", "0") == "0":
            print("interrupted", file=sys.stderr, flush=True)
        status = STATUS
        # Python would end `-m` by a signal where the error has left the exec of a string
        eval("0")  # noqa: S307
    sys.exit(status if isinstance(status, int) else 0)


@contextlib.contextmanager
def held() -> Iterator[list[bool]]:
    """Record Ctrl-C in the yielded list while the body runs, instead of raising
    KeyboardInterrupt.
    """
    interrupts: list[bool] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def _started_here() -> bool:
    """Return True if this process was started as `python -m examples.gpt_pretrain...`."""
    return sys.argv[0] == "-m" and sys.orig_argv[-len(sys.argv)].startswith("examples.gpt_pretrain")


if _started_here() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_at_once)
