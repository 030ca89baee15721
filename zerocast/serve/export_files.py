"""The files of an export: ExportPlan says which rank writes which tensors into which file, and a
SafetensorsFile is written tensor by tensor.

Names, shapes and dtypes are known before any value, so every rank makes the same plan, and the
first rank knows the index without a message from the others.

The package safetensors writes a file from tensors that are all in memory. But the header needs only
their names, dtypes and shapes. It is written first, and each tensor then goes to its place. A file
is eight bytes with the length of the header, the header in JSON, padded with spaces to a multiple
of eight bytes, and the tensors without gaps.
"""

import ctypes
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import IO

import torch
from torch import Tensor

from zerocast.checkpoint.sources.safetensors_files import DTYPES
from zerocast.checkpoint.store import Location, StorePath
from zerocast.checkpoint.whole_folder import sync
from zerocast.formats.layout import round_up
from zerocast.serve.stored_tensor import Piece, StoredTensor, by_piece, of_plain
from zerocast.serve.weight_source import WeightSource
from zerocast.weight import QuantizedWeight

# Returns the stored dtype of a tensor that is not quantized from its name and its own dtype.
PlainDtype = Callable[[str, torch.dtype], torch.dtype]
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


@dataclass(frozen=True)
class ExportPlan:
    """The files of an export.

    Attributes:
        files: the files in the order of their numbers.
    """

    files: Sequence[FileLayout]

    @staticmethod
    def build(units: Sequence[Sequence[StoredTensor]], ranks: int, shard_bytes: int, naming: str) -> "ExportPlan":
        """Divide tensors among ranks and files.

        The tensors of a unit, such as codes and scales, are in one file. Each unit goes to the rank
        that has the fewest bytes so far, so that ranks write at the same time. A file has at most
        `shard_bytes` bytes of tensors, unless a unit has more. Raises ValueError for a name that
        two tensors have.
        """
        names = Counter(tensor.name for unit in units for tensor in unit)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ValueError(f"two tensors are called {twice[0]}")
        nbytes = [0] * ranks
        units_of: list[list[Sequence[StoredTensor]]] = [[] for _ in range(ranks)]
        for unit in units:
            rank = nbytes.index(min(nbytes))
            nbytes[rank] += _nbytes(unit)
            units_of[rank].append(unit)
        contents = [
            (rank, tensors) for rank, of_rank in enumerate(units_of) for tensors in _filled(of_rank, shard_bytes)
        ]
        # A model without tensors has an empty file.
        contents = contents or [(0, [])]
        metadata = {"format": "pt", "naming": naming}
        files = [
            FileLayout(f"model-{number:05d}-of-{len(contents):05d}.safetensors", rank, tensors, metadata)
            for number, (rank, tensors) in enumerate(contents, 1)
        ]
        return ExportPlan(files)

    def files_of(self, rank: int) -> list[FileLayout]:
        """Return the files that a rank writes."""
        return [file for file in self.files if file.writer == rank]

    @property
    def index(self) -> bytes:
        """The index: the file of each tensor by name, and the bytes of all."""
        file_of = {tensor.name: file.name for file in self.files for tensor in file.tensors}
        total_size = sum(_nbytes(file.tensors) for file in self.files)
        content = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(file_of.items()))}
        return json.dumps(content, indent=1).encode()

    @property
    def lines(self) -> list[str]:
        """A line for each tensor, which must be the same on all ranks."""
        return [
            f"{tensor.name} {tensor.dtype} {list(tensor.shape)} in {file.name}"
            for file in self.files
            for tensor in file.tensors
        ]


def planned_units(
    source: WeightSource, naming: str, pieces: Mapping[str, Sequence[Piece]], plain_dtype: PlainDtype
) -> Iterator[Sequence[StoredTensor]]:
    """Yield the tensors that store each piece of each tensor of a source, without values.

    Raises ValueError for a weight that the naming cannot express.
    """
    for name, shape in source.shapes.items():
        fmt = source.formats.get(name)
        if fmt is None:
            dtype = source.dtypes[name]
            value = torch.empty(shape, dtype=dtype, device="meta")
            yield from ([tensor] for tensor in of_plain(value, pieces[name], plain_dtype(name, dtype)))
        else:
            yield from by_piece(QuantizedWeight.empty(shape, fmt, device="meta"), naming, name, pieces[name])


def _filled(units: Sequence[Sequence[StoredTensor]], shard_bytes: int) -> list[list[StoredTensor]]:
    """Return the tensors of each file."""
    files: list[list[StoredTensor]] = []
    nbytes = 0
    for unit in units:
        if not files or nbytes + _nbytes(unit) > shard_bytes:
            files.append([])
            nbytes = 0
        files[-1] += unit
        nbytes += _nbytes(unit)
    return files


def _nbytes(tensors: Sequence[StoredTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
