"""The command line: `zerocast <command>`, also as `python -m zerocast <command>`.

Each command is a module. Commands need the packages of the extra `cli`, which the library itself
never imports.
"""

import os
import signal
import sys
from collections.abc import Sequence

from zerocast.cli import interrupts
from zerocast.cli.app import find

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
        with interrupts.remembered():
            status = _run(arguments)
        # If a library has caught the KeyboardInterrupt, the command ends as usual.
        if not interrupts.was_interrupted():
            return status
    except BrokenPipeError:
        # The reader has ended, as `| head` does. Python flushes stdout when it ends, which would
        # raise once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except BaseException as error:
        if not (interrupts.was_interrupted() or isinstance(error, KeyboardInterrupt)):
            raise
    interrupts.print_line()
    return interrupts.STATUS


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
