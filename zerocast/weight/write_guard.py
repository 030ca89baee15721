"""WriteGuard: whether a write of many parts (masters, moments, weights) was completed.

Out of memory or a dead rank can stop a step, a cast or a load half-way. What that leaves is
partial: nothing reads or saves it before a complete write. What is always written together shares
one guard; what belongs to several owners is written under the guards of all (`transaction`). While
one thread writes, what it writes is partial for all others.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

CAST_AGAIN = "weights are partly of two casts; cast again, which writes them whole, or end the run if ranks have died"


@dataclass(eq=False)
class WriteGuard:
    """Tracks whether a multi-part write completed.

    Attributes:
        remedy: what the user does when a write broke off. A host gives it once.
        recast_remedy: the same for a write of weights alone, whose masters are complete; None where
            the remedy is the same.
        partial: what broke off, and its remedy; None while everything is complete.
    """

    remedy: str = CAST_AGAIN
    recast_remedy: str | None = None
    partial: str | None = field(default=None, init=False)
    _partial_masters: bool = field(default=False, init=False)
    # the thread that writes, and what
    _writer: int | None = field(default=None, init=False)
    _written: str = field(default="", init=False)

    @contextlib.contextmanager
    def transaction(self, what: str, *, masters: bool = True) -> Iterator[None]:
        """Write `what`; an exception leaves everything partial until another transaction completes.

        A transaction inside another one is a part of it. One that writes no `masters` does not
        complete partial ones.
        """
        if self.is_open:
            yield
            return
        self._check_idle()
        if not (self.has_partial_masters and not masters):
            self.mark_partial(what, masters=masters)
        self._writer, self._written = threading.get_ident(), what
        try:
            yield
            if masters or not self._partial_masters:
                self.partial, self._partial_masters = None, False
        finally:
            self._writer = None

    @contextlib.contextmanager
    def overlooked(self) -> Iterator[None]:
        """Inside, partial weights may be read: for a reader that will overwrite everything."""
        self._check_idle()
        before, self._writer = self._writer, threading.get_ident()
        self._written = self._written if before else "a load"
        try:
            yield
        finally:
            self._writer = before

    def mark_partial(self, what: str, *, masters: bool = True) -> None:
        """Declare that `what` broke off while it wrote weights, and masters unless told
        otherwise.
        """
        remedy = self.remedy if masters or self.recast_remedy is None else self.recast_remedy
        self.partial, self._partial_masters = f"{what} raised half-way: {remedy}", masters

    @property
    def is_open(self) -> bool:
        """True if this thread is within a transaction, of which another would be a part."""
        return self._writer == threading.get_ident()

    @property
    def is_open_elsewhere(self) -> bool:
        """True if another thread is within a transaction."""
        return self._writer not in (None, threading.get_ident())

    @property
    def is_quiet(self) -> bool:
        """True while no thread writes and nothing is partial, as before nearly every read."""
        return self._writer is None and self.partial is None

    @property
    def is_partial(self) -> bool:
        """True if a write broke off, and no other has completed since; False inside a
        transaction.
        """
        return self.partial is not None and not self.is_open

    @property
    def has_partial_masters(self) -> bool:
        """The same of a write of masters, which no cast can complete."""
        return self.is_partial and self._partial_masters

    def check_complete(self) -> None:
        """RuntimeError while a write is partial; it names the write and the remedy."""
        if self.partial is not None and not self.is_open:
            self._check_idle()
            raise RuntimeError(self.partial)

    def _check_idle(self) -> None:
        """RuntimeError while another thread writes."""
        if self.is_open_elsewhere:
            raise RuntimeError(
                f"another thread is in the middle of {self._written}: what it writes is partly old and partly new until that "
                "returns, so let threads take turns"
            )


@contextlib.contextmanager
def transaction(guards: Iterable[WriteGuard], what: str, *, masters: bool = True) -> Iterator[None]:
    """Write `what` under all these guards: if it breaks off, it is partial for each of their
    owners.
    """
    with contextlib.ExitStack() as stack:
        for guard in guards:
            stack.enter_context(guard.transaction(what, masters=masters))
        yield
