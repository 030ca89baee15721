"""SafetensorsSource: a safetensors file, or a folder of them with or without an index, mapped into
memory.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any

from torch import Tensor

from zerocast.checkpoint.sources.source import Entry, TensorSource, slices_of
from zerocast.checkpoint.store import check_regular, read_bounded

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_INDEX_BYTES = 2**28
# The names of torch's dtypes by the names that safetensors gives them.
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


class SafetensorsSource(TensorSource):
    """Tensors of safetensors files; `path` is a file, an index or a folder.

    Raises ValueError, with the name of the file, if a file is truncated or damaged, if a file in
    the index is missing or lacks a tensor, or if two files hold the same tensor;
    ModuleNotFoundError without the package safetensors.
    """

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        # The open file and the entry of each tensor keyed by name.
        self._files: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}
        index = _index_of(path)
        if index is not None:
            self._open_index(index)
        else:
            for file in sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]:
                self._open(file, None)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of a tensor; nothing else is read from the file."""
        opened = self._files[name]
        box = slices_of(offsets, sizes)
        tensor: Tensor = _with_read_errors(
            self.location, lambda: opened.get_slice(name)[box] if box else opened.get_tensor(name)
        )
        return tensor

    def _open_index(self, index: Path) -> None:
        content = read_bounded(index, MAX_INDEX_BYTES)
        try:
            file_of: dict[str, str] = dict(json.loads(content)["weight_map"])
            outside = [file for file in file_of.values() if PurePath(file).name != file]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{index} is not an index of safetensors files: {error!r}") from None
        if outside:
            raise ValueError(f"{index} points out of its folder: {outside[0]!r}")
        for file in sorted(set(file_of.values())):
            self._open(index.parent / file, {name for name, other in file_of.items() if other == file})

    def _open(self, file: Path, wanted: set[str] | None) -> None:
        """Register the tensors of a file: all, or those that an index names."""
        from safetensors import safe_open  # noqa: PLC0415

        # safe_open would block on a FIFO.
        check_regular(file)
        if not file.is_file():
            raise ValueError(f"{file} is missing, but the index of {self.location} lists it")
        opened = _with_read_errors(str(file), lambda: safe_open(file, "pt"))
        names = set(opened.keys())
        for name in sorted(names if wanted is None else wanted):
            if name not in names:
                raise ValueError(f"{name} is not in {file}, but the index of {self.location} says so")
            if name in self.entries:
                raise ValueError(f"{name} is in two files of {self.location}, the second is {file}")
            view = opened.get_slice(name)
            dtype = str(view.get_dtype())
            self._files[name] = opened
            self.entries[name] = Entry(tuple(view.get_shape()), DTYPES.get(dtype, dtype))


def is_safetensors(path: Path) -> bool:
    """Return True for a safetensors file or index by name, and for a folder that contains one."""
    if path.is_dir():
        return any(path.glob(f"*{SUFFIX}")) or any(path.glob(f"*{INDEX_SUFFIX}"))
    return path.name.endswith((SUFFIX, INDEX_SUFFIX))


def _index_of(path: Path) -> Path | None:
    if path.name.endswith(INDEX_SUFFIX):
        return path
    indices = sorted(path.glob(f"*{INDEX_SUFFIX}")) if path.is_dir() else []
    if len(indices) > 1:
        raise ValueError(f"{path} holds {len(indices)} indices: pass one of {', '.join(file.name for file in indices)}")
    return indices[0] if indices else None


def _with_read_errors(location: str, work: Callable[[], Any]) -> Any:
    """Return `work()`. Errors of safetensors are raised as ValueError with the `location`."""
    from safetensors import SafetensorError  # noqa: PLC0415

    try:
        return work()
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{location} cannot be read as safetensors: {error}") from None
