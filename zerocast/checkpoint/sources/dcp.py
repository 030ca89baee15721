"""DcpSource: a torch.distributed.checkpoint folder of any program, saved by any number of ranks."""

import functools
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from zerocast.checkpoint.sources.safe_reader import SafeReader
from zerocast.checkpoint.sources.source import Entry, dtype_name
from zerocast.checkpoint.torch_checkpoint import load
from zerocast.distributed.group import ONE_PROCESS


class DcpSource:
    """Tensors of a checkpoint folder; objects that are no tensors are skipped and never unpickled.

    Files are stored rank by rank, so `read` holds one whole tensor in memory; ranks that load
    together through `reader` do not. Raises pickle.UnpicklingError for metadata that would run
    code, ValueError for damaged metadata.
    """

    def __init__(self, path: Path) -> None:
        self.place, self._path = str(path), path
        found = SafeReader(path).read_metadata().state_dict_metadata
        self._entries = {
            name: Entry(tuple(tensor.size), dtype_name(tensor.properties.dtype))
            for name, tensor in found.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        self._whole = functools.lru_cache(maxsize=1)(self._load)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Shape and dtype of each tensor by name."""
        return self._entries

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of a tensor, which stays in memory until another tensor is read."""
        box = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
        return self._whole(name)[box]

    def reader(self) -> StorageReader:
        """The folder as storage that torch.distributed.checkpoint loads from."""
        return SafeReader(self._path)

    def _load(self, name: str) -> Tensor:
        entry = self._entries[name]
        state = {name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))}
        try:
            load(state, self.reader(), ONE_PROCESS, self.place)
        except (
            pickle.UnpicklingError,
            RuntimeError,
            ValueError,
            AssertionError,
            OSError,
        ) as error:
            reason = str(error).strip().splitlines()
            raise ValueError(f"{name} cannot be read from {self.place}: {' '.join(reason[-1:])}") from error
        return state[name]
