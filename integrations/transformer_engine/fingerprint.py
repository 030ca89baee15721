"""Fingerprint: the objects and addresses that a call has read, for the next call to compare.

Comparing identities is cheaper than inspecting every tensor of a model at every step.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


@functools.cache
def _reader(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads these attributes of an object and returns a tuple.

    `operator.attrgetter` returns a tuple for two names or more.
    """
    assert len(names) > 1, names
    return operator.attrgetter(*names)


class Fingerprint:
    """The tensors of a list and the values of some of their attributes.

    It has strong references to the values, so that their ids stay unique, and weak ones to the
    tensors of the list.

    Args:
        tensors: the list.
        watched: for each tensor, the names of its attributes; dotted ones are attributes of
            attributes. A tensor without names need only be the same object.
    """

    def __init__(self, tensors: Sequence[Any], watched: Sequence[tuple[str, ...]]) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._readers = [(index, _reader(names)) for index, names in enumerate(watched) if names]
        self._values = self._read(tensors)
        self._buffers = [value for value in self._values if isinstance(value, Tensor)]
        self._addresses = self._current_addresses()

    def matches(self, tensors: Sequence[Any]) -> bool:
        """Return True if these are the same tensors and objects, with all buffers at the same
        addresses.
        """
        if len(tensors) != len(self._tensors):
            return False
        if not all(map(operator.is_, tensors, [reference() for reference in self._tensors])):
            return False
        try:
            values = self._read(tensors)
        except AttributeError:
            # An attribute with a dotted name below it is None now, such as a quantizer.
            return False
        return all(map(operator.is_, values, self._values)) and self._current_addresses() == self._addresses

    def _read(self, tensors: Sequence[Any]) -> list[Any]:
        return [value for index, read in self._readers for value in read(tensors[index])]

    def _current_addresses(self) -> list[int]:
        return [buffer.data_ptr() for buffer in self._buffers]
