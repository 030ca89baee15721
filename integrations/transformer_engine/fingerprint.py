"""Fingerprint: which objects and addresses a call found at its tensors, so that the next call can tell that nothing moved."""

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


@functools.cache
def _reader(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """All of these attributes at once; one of them alone would come without a tuple around it."""
    assert len(names) > 1, names
    return operator.attrgetter(*names)


class Fingerprint:
    """The tensors of a list and, for each, the objects that `watched` attributes held; dotted names are attributes of those.

    Keeps what the attributes held, and no tensor of the list, alive. A tensor with nothing watched need only be the same one.
    """

    def __init__(self, tensors: Sequence[Any], watched: Sequence[tuple[str, ...]]) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._readers = [(index, _reader(names)) for index, names in enumerate(watched) if names]
        self._values = self._read(tensors)
        self._buffers = [value for value in self._values if isinstance(value, Tensor)]
        self._addresses = self._current_addresses()

    def matches(self, tensors: Sequence[Any]) -> bool:
        """Whether these are the same tensors with the same objects, every buffer where it was: a look at each, and no more."""
        if len(tensors) != len(self._tensors):
            return False
        if not all(map(operator.is_, tensors, [reference() for reference in self._tensors])):
            return False
        try:
            values = self._read(tensors)
        except AttributeError:  # of something that is None now
            return False
        return all(map(operator.is_, values, self._values)) and self._current_addresses() == self._addresses

    def _read(self, tensors: Sequence[Any]) -> list[Any]:
        return [value for index, read in self._readers for value in read(tensors[index])]

    def _current_addresses(self) -> list[int]:
        return [buffer.data_ptr() for buffer in self._buffers]
