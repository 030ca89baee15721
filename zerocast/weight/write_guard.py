"""Wholeness: whether what is written in many pieces was written to its end.

What raises while it writes masters or weights (out of memory, a rank that died) leaves them torn, and they are not read until they
have been written whole.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(eq=False)
class Wholeness:
    """Of what is written within `writing`."""

    torn: str | None = None  # what died while it wrote, and what to do now
    _writing: bool = field(default=False, init=False)

    @contextlib.contextmanager
    def writing(self, what: str, remedy: str) -> Iterator[None]:
        """Within, `what` writes masters or weights; an exception leaves them torn until another such write is complete."""
        if self._writing:
            yield  # a part of something larger
            return
        self._writing, self.torn = True, f"{what} raised half-way: {remedy}"
        try:
            yield
            self.torn = None
        finally:
            self._writing = False

    @contextlib.contextmanager
    def overlooked(self) -> Iterator[None]:
        """Within, what is torn is shown all the same, to somebody who will write it whole."""
        before, self._writing = self._writing, True
        try:
            yield
        finally:
            self._writing = before

    @property
    def is_writing(self) -> bool:
        """Whether a write is under way, of which another may be a part."""
        return self._writing

    @property
    def is_torn(self) -> bool:
        """Whether something died while it wrote, and nothing has been written whole since."""
        return self.torn is not None and not self._writing

    def check_whole(self) -> None:
        """RuntimeError while masters or weights are torn."""
        if self.is_torn:
            raise RuntimeError(self.torn)
