"""ExportPlan: which rank writes which tensors of an export, and into which file.

Names, shapes and dtypes are known before any value, so every rank makes the same plan, and the
first rank knows the index without a message from the others.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from zerocast.serve.piece import Piece
from zerocast.serve.safetensors_file import FileLayout
from zerocast.serve.stored_tensor import StoredTensor, by_piece, of_plain
from zerocast.serve.weight_source import WeightSource
from zerocast.weight import QuantizedWeight

# Returns the stored dtype of a tensor that is not quantized from its name and its own dtype.
PlainDtype = Callable[[str, torch.dtype], torch.dtype]


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
