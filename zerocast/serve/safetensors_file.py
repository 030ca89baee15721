"""SafetensorsFile: a safetensors file that is written tensor by tensor.

The package safetensors writes a file from tensors that are all in memory. But the header needs only
their names, dtypes and shapes. It is written first, and each tensor then goes to its place.

A file is eight bytes with the length of the header, the header in JSON, padded with spaces to a
multiple of eight bytes, and the tensors without gaps.
"""

import ctypes
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import IO

import torch
from torch import Tensor

from zerocast.checkpoint.sources.safetensors_files import DTYPES
from zerocast.checkpoint.store import Location, StorePath
from zerocast.checkpoint.whole_folder import sync
from zerocast.formats.layout import round_up
from zerocast.serve.stored_tensor import StoredTensor

_NAMES = {getattr(torch, dtype): name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class FileLayout:
    """The names and places of the tensors of a file.

    Attributes:
        name: the name of the file.
        writer: the rank that writes it.
        tensors: its tensors. Their values are not used.
        metadata: text by name for the header.
    """

    name: str
    writer: int
    tensors: Sequence[StoredTensor]
    metadata: Mapping[str, str]

    @cached_property
    def header(self) -> bytes:
        """The bytes before the first tensor. Raises KeyError for a dtype that safetensors has no
        name for.
        """
        entries: dict[str, object] = {"__metadata__": dict(self.metadata)}
        first = 0
        # Larger elements come first, so that each tensor is aligned in a file that is mapped.
        for tensor in sorted(self.tensors, key=lambda tensor: -tensor.dtype.itemsize):
            offsets = [first, first + tensor.nbytes]
            entries[tensor.name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": offsets,
            }
            first = offsets[1]
        text = json.dumps(entries, separators=(",", ":")).encode()
        text = text.ljust(round_up(len(text), 8))
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    def offsets(self) -> dict[str, int]:
        """Return a dict from name to the offset of a tensor's bytes in the file."""
        entries = json.loads(self.header[8:])
        return {tensor.name: len(self.header) + entries[tensor.name]["data_offsets"][0] for tensor in self.tensors}


class SafetensorsFile:
    """A file that is being written. In a store, which takes whole files, it is in memory until
    `close`.
    """

    def __init__(self, folder: Location, layout: FileLayout) -> None:
        self._path = folder / layout.name
        self._offsets = layout.offsets()
        self._stream: IO[bytes] = io.BytesIO() if isinstance(self._path, StorePath) else self._path.open("xb")
        self._stream.write(layout.header)

    @property
    def is_complete(self) -> bool:
        """True once all tensors were written."""
        return not self._offsets

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a contiguous tensor from any device. Raises KeyError for one that is not
        missing.
        """
        self._stream.seek(self._offsets.pop(name))
        on_host = tensor.detach().cpu()
        # Tensor.numpy would forbid FSDP2 to free the storage afterwards.
        self._stream.write((ctypes.c_ubyte * on_host.nbytes).from_address(on_host.data_ptr()))

    def close(self) -> None:
        """Write what is buffered and flush the file to the disk."""
        if isinstance(self._path, StorePath):
            assert isinstance(self._stream, io.BytesIO)
            self._path.write_bytes(self._stream.getvalue())
        self._stream.close()
        sync(self._path)

    def abandon(self) -> None:
        """Close the file as it is."""
        self._stream.close()
