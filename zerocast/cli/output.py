"""The output of commands: files that are written completely or not at all, and a line of progress
on stderr.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

# Seconds before the first line of progress, and between two lines on a terminal or in a file.
FIRST_SECONDS = 1.0
TERMINAL_SECONDS = 0.1
FILE_SECONDS = 10.0

T = TypeVar("T")


def check_folder(path: Path | None) -> None:
    """Raise FileNotFoundError if the folder of an output file is missing. Called before the work
    whose result is to be written.
    """
    if path is not None and not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}")


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` when the body ends, and removed if it
    raises.
    """
    if path.exists() and not path.is_file():
        # The path is a device such as /dev/null, or a folder, which raises on writing.
        yield path
        return
    partial = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


class Progress:
    """A line on stderr that names the item that a command works on, once the command has taken a
    second. On a terminal it is overwritten; in a file there is a line every few seconds.

    Args:
        total: the number of items; 0 if it is unknown.
    """

    def __init__(self, total: int = 0) -> None:
        self._total = total
        self._number = 0
        self._terminal = sys.stderr.isatty()
        # The time of the next line, by the monotonic clock.
        self._next = time.monotonic() + FIRST_SECONDS

    def say(self, item: str) -> None:
        """Show that the work on the next item begins."""
        self._number += 1
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (TERMINAL_SECONDS if self._terminal else FILE_SECONDS)
        line = f"{self._number:,} of {self._total:,}: {item}" if self._total else item
        sys.stderr.write(f"\r\x1b[K{line[:78]}" if self._terminal else f"{line}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Remove the line from a terminal. Called before anything else is written."""
        if self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def tracked(items: Sequence[T], name: Callable[[T], str] = str) -> Iterator[T]:
    """Yield the items, with a line of progress that names the current one."""
    progress = Progress(len(items))
    try:
        for item in items:
            progress.say(name(item))
            yield item
    finally:
        progress.clear()
