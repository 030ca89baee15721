"""StateDictSource: a plain state dict, in memory or in a file of torch.save.

Files are read with `weights_only`, which builds nothing but tensors and containers, and are mapped
if torch can map them. Nested dictionaries are flattened with names joined by dots; values that are
not tensors are skipped.
"""

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerocast.checkpoint.regular_file import check_regular
from zerocast.checkpoint.sources.source import Entry, TensorSource, dtype_name, slices_of

# The levels of nested dictionaries that are read.
DEEPEST = 16


class StateDictSource(TensorSource):
    """Tensors of a mapping from names to tensors."""

    def __init__(self, state: Mapping[str, Any], location: str = "the state dict") -> None:
        self.location = location
        try:
            self._tensors = dict(_tensors(state, "", DEEPEST))
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from None
        self.entries = {name: Entry(tuple(tensor.shape), _kind(tensor)) for name, tensor in self._tensors.items()}

    @staticmethod
    def of_file(path: Path) -> "StateDictSource":
        """Open a file of torch.save. Raises ValueError if it is damaged or has more than plain
        tensors.
        """
        check_regular(path)
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except FileNotFoundError:
            raise
        except Exception as error:
            # torch raises many kinds of errors for a damaged file. Only the first sentence is kept:
            # after it torch advises to load with weights_only=False, which runs code of the file.
            first_line = next(iter(str(error).strip().splitlines()), "")
            reason = first_line.partition(". In PyTorch")[0]
            raise ValueError(f"{path} is not a file of plain tensors: {type(error).__name__}: {reason}") from None
        if not isinstance(state, Mapping):
            raise ValueError(f"{path} holds a {type(state).__name__}, expected a state dict")
        return StateDictSource(state, str(path))

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of a tensor: a view, or a copy from its device."""
        return self._tensors[name].detach()[slices_of(offsets, sizes)].cpu()


def _tensors(state: Mapping[Any, Any], prefix: str, levels: int) -> Iterator[tuple[str, Tensor]]:
    if not levels:
        raise ValueError(f"dictionaries are nested more than {DEEPEST} deep")
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{key}.", levels - 1)


def _kind(tensor: Tensor) -> str:
    """Return the name of the dtype, or a name for the kind of tensor if its elements cannot be
    read.
    """
    if type(tensor) not in (Tensor, nn.Parameter):
        return type(tensor).__name__
    if tensor.is_meta or tensor.layout is not torch.strided:
        return "meta" if tensor.is_meta else dtype_name(tensor.layout)  # type: ignore[arg-type]
    return dtype_name(tensor.dtype)
