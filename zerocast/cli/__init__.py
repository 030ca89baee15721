"""The command line: `zerocast <command>`, also as `python -m zerocast <command>`.

Each command is one module. They need the extra `cli`, whose packages the library itself never
imports.
"""

import os
import signal
import sys
from collections.abc import Sequence

from zerocast.cli import interrupts
from zerocast.cli.app import find

NO_READER = 128 + signal.SIGPIPE
EXTRA = ("matplotlib", "tyro")  # safetensors is imported only to read or write such files


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default the one of this process's command line; returns the exit status,
    which is 130 after a Ctrl-C and 141 once the reader of the output is gone.
    """
    if arguments is None:
        interrupts.own_process()
    try:
        return _run(arguments)
    except BrokenPipeError:  # the reader has gone, as `| head` does; nothing is left to be flushed to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except BaseException as error:
        if not (interrupts.came() or isinstance(error, KeyboardInterrupt)):
            raise
    finally:
        interrupts.over()
    interrupts.say()
    return interrupts.STATUS


def _run(arguments: Sequence[str] | None) -> int:
    try:
        call = find(arguments)
        with interrupts.raised():
            status = call.parsed()()
            sys.stdout.flush()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        print(f"the command line needs {package}: pip install 'zerocast[cli]'", file=sys.stderr)
        return 2
    if interrupts.came():
        raise KeyboardInterrupt  # a library swallowed the first one
    return status
