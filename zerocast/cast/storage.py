"""StorageTable: many tensors seen as offsets into the few storages that hold them."""

import operator
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, UntypedStorage

from zerocast.formats.memory import check_storage
from zerocast.weight import QuantizedWeight


class Places:
    """Where tensors are, to find out later whether one was given other memory (`.data =`), or its
    storage made another size (`untyped_storage().resize_`).

    Each tensor is compared by address and size, each storage behind one once.
    """

    def __init__(self, tensors: Iterable[Tensor], storages: Iterable[Tensor] = ()) -> None:
        self._tensors = list(tensors)
        by_address = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in (*self._tensors, *storages)
        }
        self._storages = list(by_address.values())
        self._noted = self._look()

    def moved(self) -> bool:
        """True if any of them has other memory than when this was made."""
        return self._look() != self._noted

    def _look(self) -> list[object]:
        """Lists, which the interpreter makes without a loop of ours: this runs in every cast."""
        tensors, sizes = self._tensors, list(map(UntypedStorage.nbytes, self._storages))
        return [list(map(Tensor.data_ptr, tensors)), list(map(_nbytes, tensors)), list(map(_dtype, tensors)), sizes]


_nbytes: Callable[[Tensor], int] = operator.attrgetter("nbytes")
_dtype: Callable[[Tensor], torch.dtype] = operator.attrgetter("dtype")


class StorageTable:
    """Collects the storages behind the tensors of one role; a stage gets them as a list of flat
    tensors.

    `dtype` is the role's, uint8 for data of any kind. `followed` holds the tensors whose addresses
    tell that something moved: the first of each storage, and those that `add` was asked to follow.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.tensors: list[Tensor] = []
        self.followed: list[Tensor] = []
        self._index: dict[tuple[int, int], int] = {}

    def add(self, tensor: Tensor, follow: bool = False) -> tuple[int, int]:
        """(base index, offset in elements of `dtype`) of a contiguous tensor."""
        storage = tensor.untyped_storage()
        # storages of one address may differ in size: a host made them over memory of its own
        key = storage.data_ptr(), storage.nbytes()
        is_new = key not in self._index
        if is_new:
            self._index[key] = len(self.tensors)
            flat = torch.empty(0, dtype=self.dtype, device=tensor.device)
            self.tensors.append(flat.set_(storage, 0, (storage.nbytes() // self.dtype.itemsize,), (1,)))
        if is_new or follow:
            self.followed.append(tensor)
        return self._index[key], tensor.storage_offset() * tensor.element_size() // self.dtype.itemsize

    def add_whole(self, tensor: Tensor) -> tuple[int, int]:
        """(base index, 0) of a flat tensor that is a base by itself, so that others of its size
        can be beside it.
        """
        check_storage("a master", tensor)
        self.tensors.append(tensor)
        self.followed.append(tensor)
        return len(self.tensors) - 1, 0


def storages_of(tensors: Iterable[Tensor]) -> set[int | None]:
    """The addresses of the storages that these tensors have elements in; None stands for one that
    cannot be known.

    A DTensor lies where its local tensor does, a QuantizedWeight where its codes do. Tensors on the
    meta device, and other subclasses without storage, are not known.
    """
    return {_storage_of(tensor) for tensor in tensors} - {0}


def _storage_of(tensor: Tensor) -> int | None:
    """Zero for a tensor without elements on this rank."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if not local.numel():
        return 0
    if isinstance(local, QuantizedWeight):
        local = local.state.rowwise_data
    try:
        return local.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None
