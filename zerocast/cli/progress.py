"""How far a command is: a line on stderr that is overwritten on a terminal, and rare in a file."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

FIRST_SECONDS = 1.0
TERMINAL_SECONDS, FILE_SECONDS = 0.1, 10.0

T = TypeVar("T")


class Progress:
    """Says what a command works on, once that has taken a second; `total` is 0 if unknown."""

    def __init__(self, total: int = 0) -> None:
        self._total, self._number = total, 0
        self._terminal = sys.stderr.isatty()
        self._next = time.monotonic() + FIRST_SECONDS

    def say(self, what: str) -> None:
        """The next piece of work begins."""
        self._number += 1
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (TERMINAL_SECONDS if self._terminal else FILE_SECONDS)
        line = f"{self._number:,} of {self._total:,}: {what}" if self._total else what
        sys.stderr.write(f"\r\x1b[K{line[:78]}" if self._terminal else f"{line}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Before anything else is written."""
        if self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def tracked(items: Sequence[T], name: Callable[[T], str] = str) -> Iterator[T]:
    """Yield the items, and say which one is worked on."""
    progress = Progress(len(items))
    try:
        for item in items:
            progress.say(name(item))
            yield item
    finally:
        progress.clear()
