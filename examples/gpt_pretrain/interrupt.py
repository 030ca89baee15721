"""Ctrl-C in the examples: one line and exit code 130."""

import os
import signal
import sys
from collections.abc import Callable

STATUS = 128 + signal.SIGINT


def run(main: Callable[[], object]) -> None:
    """Call `main` and end the process with its exit status, 0 if it returns none, 130 on Ctrl-C."""
    try:
        status = main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the processes of a run have ended by now
        if os.environ.get("RANK", "0") == "0":
            print("interrupted", file=sys.stderr, flush=True)
        status = STATUS
    sys.exit(status if isinstance(status, int) else 0)
