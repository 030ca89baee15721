"""The launch of a stage for all weights together, and how a program finds its weight and its data.

A kernel gets the descriptor table, an int64 tensor of addresses for each list of bases, and a
`Tiling`, from whose running sum a program finds its weight (`find`). All three are made once and
cached, so that the CPU work of a step does not grow with the number of weights and the CPU never
waits for the device.
"""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zerocast.backends.descriptor import WIDTH as _WIDTH
from zerocast.backends.descriptor import Column

_KEPT_ADDRESSES = 1024


class Geometry(Protocol):
    """Splits the work on one row of a table into tiles; a hashable value."""

    def count(self, row: list[int]) -> int:
        """Return the number of tiles of a row; 0 if there is nothing to do."""


@dataclass(frozen=True)
class Tiling:
    """The tiles of all rows, numbered consecutively: row i has `[firsts[i], firsts[i + 1])`."""

    firsts: Tensor  # int64 [n + 1], on the device
    rows: int
    total: int


# table -> {geometry: Tiling}. A tiling is dropped together with its table.
_tilings: Any = WeakIdKeyDictionary()


def tiling(table: Tensor, geometry: Geometry) -> Tiling:
    """Return the tiles of a table, which must not change afterwards; the first call waits for the
    device.
    """
    tilings: dict[Geometry, Tiling] = _tilings.setdefault(table, {})
    if geometry not in tilings:
        firsts = [0]
        for row in table.tolist():
            firsts.append(firsts[-1] + geometry.count(row))
        tilings[geometry] = Tiling(torch.tensor(firsts, device=table.device), len(firsts) - 1, firsts[-1])
    return tilings[geometry]


def addresses(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the addresses of base tensors as an int64 tensor on the device.

    A CUDA graph reads this tensor at every replay, so a tensor that is used during a capture is
    kept as long as the process lives.
    """
    on_device = _addresses(tuple([tensor.data_ptr() for tensor in tensors]), device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured[id(on_device)] = on_device
    return on_device


# Address tensors of all captures so far, keyed by id. Never emptied: the end of a graph's life is
# not known.
_captured: dict[int, Tensor] = {}


@functools.lru_cache(maxsize=_KEPT_ADDRESSES)
def _addresses(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values or (0,), dtype=torch.int64, device=device)


def skip_flag(skip: Tensor | None, device: torch.device) -> Tensor:
    """Return `skip` as a uint8[1] for a kernel to read; None becomes a flag that is never set."""
    return _never(device) if skip is None else skip.view(torch.uint8)


@functools.cache
def _never(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.uint8, device=device)


def launch(
    kernel: Any,
    programs: int,
    device: torch.device,
    *arguments: Any,
    num_warps: int = 4,
    registers: int | None = None,
    **constants: Any,
) -> None:
    """Launch a Triton kernel on the device's current stream, without contracting multiply and add.

    `registers` bounds the registers of a thread. Masked tiles need many, full tiles few, and the
    larger need would decide how many programs share a multiprocessor. With a bound the rare masked
    tiles spill registers and the full ones run at full speed.
    """
    if programs == 0:
        return
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        kernel[(programs,)](*arguments, **constants, num_warps=num_warps, maxnreg=registers, enable_fp_fusion=False)


WIDTH = tl.constexpr(_WIDTH)
ROWS = tl.constexpr(int(Column.ROWS))
COLUMNS = tl.constexpr(int(Column.COLUMNS))
START = tl.constexpr(int(Column.START))
NUMEL = tl.constexpr(int(Column.NUMEL))
MASTER_BASE = tl.constexpr(int(Column.MASTER_BASE))
MASTER_OFFSET = tl.constexpr(int(Column.MASTER_OFFSET))
ROW_AMAX = tl.constexpr(int(Column.ROW_AMAX))
SHARED_AMAX = tl.constexpr(int(Column.SHARED_AMAX))
COLUMN_AMAX = tl.constexpr(int(Column.COLUMN_AMAX))
ROW_DATA = tl.constexpr(int(Column.ROW_DATA_BASE))
COLUMN_DATA = tl.constexpr(int(Column.COLUMN_DATA_BASE))
ROW_SCALE = tl.constexpr(int(Column.ROW_SCALE_BASE))
COLUMN_SCALE = tl.constexpr(int(Column.COLUMN_SCALE_BASE))
AMAX = tl.constexpr(int(Column.AMAX_BASE))
SCALE = tl.constexpr(int(Column.SCALE_BASE))
HISTORY = tl.constexpr(int(Column.HISTORY_BASE))
NOT_FINITE = tl.constexpr(int(Column.NOT_FINITE))


@triton.jit
def find(firsts, n, tile):
    """Return the row that a tile belongs to: the last one whose first tile is not after it.

    The search skips rows without tiles.
    """
    low = tile * 0
    high = low + n
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(firsts + middle) <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def address(bases, row, BASE: tl.constexpr, SIZE: tl.constexpr):
    """Return the address that the columns BASE and BASE + 1 (its offset) refer to, as an integer.

    SIZE is the size of an element in bytes.
    """
    return tl.load(bases + tl.load(row + BASE)) + tl.load(row + BASE + 1) * SIZE
