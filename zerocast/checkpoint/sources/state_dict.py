"""StateDictSource: a plain state dict, in memory or in a file of torch.save.

Files are read with `weights_only`, which builds tensors and containers and nothing else, and are mapped rather than read where
torch can. Dictionaries in dictionaries are flattened, names joined by dots; values that are no tensors are passed over.
"""

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.storage import StorageReader

from zerocast.checkpoint.regular_file import check_regular
from zerocast.checkpoint.sources.source import Entry, SourceReader, dtype_name

DEEPEST = 16


class StateDictSource:
    """Tensors of a mapping."""

    def __init__(self, state: Mapping[str, Any], place: str = "the state dict") -> None:
        self.place = place
        try:
            self._tensors = dict(_tensors(state, "", DEEPEST))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        self._entries = {name: Entry(tuple(tensor.shape), _kind(tensor)) for name, tensor in self._tensors.items()}

    @staticmethod
    def of_file(path: Path) -> "StateDictSource":
        """From a file of torch.save. ValueError for one that is damaged or that holds more than tensors and containers."""
        check_regular(path)
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except FileNotFoundError:
            raise
        except Exception as error:  # whatever a damaged file makes torch say
            first = str(error).strip().splitlines()[:1]
            raise ValueError(f"{path} is no file of plain tensors: {type(error).__name__}: {' '.join(first)}") from None
        if not isinstance(state, Mapping):
            raise ValueError(f"{path} holds a {type(state).__name__} and no state dict")
        return StateDictSource(state, str(path))

    @property
    def entries(self) -> Mapping[str, Entry]:
        """What there is."""
        return self._entries

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A view of the tensor, or a copy from its device."""
        box = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
        return self._tensors[name].detach()[box].cpu()

    def reader(self) -> StorageReader:
        """For torch.distributed.checkpoint."""
        return SourceReader(self)


def _tensors(state: Mapping[Any, Any], prefix: str, levels: int) -> Iterator[tuple[str, Tensor]]:
    if not levels:
        raise ValueError(f"dictionaries are nested more than {DEEPEST} deep")
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{key}.", levels - 1)


def _kind(tensor: Tensor) -> str:
    """Its dtype; for what has no elements at hand that could be read, what it is instead."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return type(tensor).__name__
    if tensor.is_meta or tensor.layout is not torch.strided:
        return "meta" if tensor.is_meta else dtype_name(tensor.layout)  # type: ignore[arg-type]
    return dtype_name(tensor.dtype)
