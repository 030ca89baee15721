"""The memory of the shards of masters.

MasterMemory allocates it. MasterAddresses detects masters that have moved or were written.
"""

import math
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.formats.layout import BUFFER_ALIGNMENT_ELEMENTS, round_up
from zerocast.formats.memory import check_storage

# The number of tensors that masters share. FSDP2 frees each parameter after it has sharded it, so
# one tensor for all shards would have to be allocated while all parameters are still there.
PIECES = 8


class MasterMemory:
    """Allocates the shards of a model's masters next to each other in a few tensors, so that
    kernels take few tensors however many weights there are.

    FSDP2 allocates a shard when it shards a parameter or, if that was on the meta device, when the
    module is given storage. Both ask the parameter for a tensor like it (`parameter.py`), which
    comes from here the first time. A shard that is moved later (to another device, by
    `load_state_dict(assign=True)`) has separate memory. `sizes` are the numbers of elements of full
    weights, keyed by name.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        # Weights whose shard has no memory yet.
        self._waiting = dict(sizes)
        self._piece = -(-sum(sizes.values()) // PIECES)
        # The unused rest of the current piece.
        self._rest: Tensor | None = None
        # The elements of shards on the meta device.
        self._padded: dict[str, int] = {}

    def allocate(self, name: str, size: Sequence[int], device: torch.device) -> Tensor | None:
        """Return zeros f32 `size` for a shard of a weight. None if the weight has its memory
        already, or needs none.
        """
        numel = math.prod(size)
        if device.type == "meta":
            self._padded[name] = numel
        # FSDP2 asks for a short shard again once it pads it.
        if name not in self._waiting or not numel or device.type == "meta" or numel < self._padded.get(name, 0):
            return None
        # A tensor over the storage and no view of it, so that autograd counts writes to each shard
        # apart.
        shard = torch.empty(0, dtype=torch.float32, device=device)
        padded = round_up(numel, BUFFER_ALIGNMENT_ELEMENTS)
        if self._rest is None or self._rest.device != shard.device or self._rest.numel() < padded:
            piece = self._next_piece(numel / self._waiting[name], padded)
            self._rest = torch.empty(piece, dtype=torch.float32, device=device)
        del self._waiting[name]
        offset, storage = self._rest.storage_offset(), self._rest.untyped_storage()
        self._rest = self._rest[padded:] if self._waiting else None
        shard.set_(storage, offset, (numel,), (1,))
        return shard.zero_().view(tuple(size))

    def _next_piece(self, fraction: float, minimum: int) -> int:
        """Return the elements of the next piece: the shards to come, each the same `fraction` of
        its weight, until their weights fill a piece.
        """
        elements, elements_of_weights = 0, 0
        for size in self._waiting.values():
            if elements_of_weights >= self._piece:
                break
            elements_of_weights += size
            elements += round_up(math.ceil(size * fraction), BUFFER_ALIGNMENT_ELEMENTS)
        return max(elements, minimum)


class MasterAddresses:
    """Addresses and version counters of masters.

    `params` are weak references to FSDPParams, keyed by the name of the weight. All data are in
    lists, so that a check needs no Python loop over parameters.

    Masters refer to this object through their weight, so it refers to them weakly. A view of a
    master holds its base where the garbage collector does not look, and a reference cycle through
    it would never be freed.
    """

    def __init__(self, params: Mapping[str, Callable[[], Any]]) -> None:
        self._params = list(params.values())
        self._index = {name: index for index, name in enumerate(params)}
        locals_ = list(map(_local_tensor, [param() for param in self._params]))
        plains = [local.plain for local in locals_]
        self._locals = list(map(weakref.ref, locals_))
        self._addresses = list(map(Tensor.data_ptr, plains))
        # The bytes of each storage, keyed by the index of one of the masters in it.
        index_by_storage = {plain.untyped_storage().data_ptr(): index for index, plain in enumerate(plains)}
        self._storage_sizes = {i: plains[i].untyped_storage().nbytes() for i in index_by_storage.values()}
        self._counters = [[weakref.ref(_counting(t)) for t in tensors] for tensors in (locals_, plains)]
        self.record_versions()

    def has_moved(self) -> bool:
        """Return True if a parameter or its memory was replaced since this object was built."""
        locals_ = list(map(_local_tensor, [param() for param in self._params]))
        is_same = all(map(operator.is_, locals_, [local() for local in self._locals]))
        return not is_same or list(map(Tensor.data_ptr, map(_plain, locals_))) != self._addresses

    def moved_names(self) -> set[str]:
        """Return the weights whose masters are in different storage now."""
        addresses = [_local_tensor(param()).plain.data_ptr() for param in self._params]
        return {name for name, index in self._index.items() if addresses[index] != self._addresses[index]}

    def check_memory(self) -> None:
        """Raise ValueError for a master whose storage was freed or made smaller since."""
        for index, size in self._storage_sizes.items():
            local = self._locals[index]()
            if local is not None and local.plain.untyped_storage().nbytes() < size:
                check_storage(self._params[index]()._param_fqn or "a master", local.plain)

    def record_versions(self) -> None:
        """Record the version counters of masters. Called after a cast has read the masters.

        `MasterParameter.__torch_dispatch__` sees all writes except those of compiled functions,
        which only the version counters show.
        """
        self._recorded_versions = self._current_versions()

    def any_written(self) -> bool:
        """Return True if a version counter has moved since `record_versions`."""
        return self._current_versions() != self._recorded_versions

    def written(self, names: Sequence[str]) -> set[str]:
        """Return the weights among `names` whose version counters have moved since
        `record_versions`.
        """
        written = set()
        for counters, versions in zip(self._counters, self._recorded_versions, strict=True):
            for name in names:
                index = self._index[name]
                tensor = counters[index]()
                if (-1 if tensor is None else tensor._version) != versions[index]:
                    written.add(name)
        return written

    def _current_versions(self) -> list[list[int]]:
        return [_versions(counters) for counters in self._counters]


_local_tensor: Callable[[Any], Any] = operator.attrgetter("sharded_param._local_tensor")
_plain: Callable[[Any], Any] = operator.attrgetter("plain")
_uncounted = torch.empty(0)


def _versions(tensors: Sequence[Callable[[], Tensor | None]]) -> list[int]:
    """Return the version counters. -1 for a tensor that no longer exists."""
    return [-1 if (tensor := reference()) is None else tensor._version for reference in tensors]


def _counting(tensor: Tensor) -> Tensor:
    """Return the tensor whose version counter to read: `tensor`, or a constant one instead of an
    inference tensor, which has no counter.
    """
    return _uncounted if tensor.is_inference() else tensor
