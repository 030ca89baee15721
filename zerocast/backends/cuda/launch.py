"""Device memory that a launch needs besides its tensors: base addresses and work lists.

A work list gives each thread block its weight and the part of it to process. Addresses and work
lists are made once and stored on the tensors that they describe, so they live as long as a captured
graph that uses those tensors. A step then copies nothing to the device, and its CPU work does not
grow with the number of weights. Making a work list reads the table back, which is the only time
that the CPU waits for the device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.backends import extension
from zerocast.backends.descriptor import Piece
from zerocast.formats import FormatSpec
from zerocast.formats.layout import moment_groups

kernels = extension.load_kernels()
format_of = extension.format_maker(kernels)

# (address of the table, its rows, address of the (weight, ordinal) pairs, their number)
Work = tuple[int, int, int, int]
# (handle of the stream, index of its device)
Stream = tuple[int, int]

# torch.cuda.current_stream makes a Stream object, which takes ten times as long as the rest of a
# call.
_current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


def stream_of(tensor: Tensor) -> Stream:
    """Return the current stream of the tensor's device."""
    index = tensor.get_device()
    return _current_stream(index), index


def addresses(tensors: Sequence[Tensor]) -> int:
    """Return the device address of an array that has the address of each tensor; 0 for an empty
    list.
    """
    if not tensors:
        return 0
    values = tuple(map(Tensor.data_ptr, tensors))
    lists = _kept_on(tensors[0], "_zerocast_addresses")
    if values not in lists:
        on_host = torch.tensor(values, dtype=torch.int64, pin_memory=True)
        lists[values] = on_host.to(tensors[0].device, non_blocking=True)
    return int(lists[values].data_ptr())


class StandIns:
    """Placeholders for tensors whose addresses change between replays of a CUDA graph.

    The graph is recorded with the placeholders. At a replay it reads addresses from the array that
    `addresses` made for them, into which `fill` writes the addresses of the current tensors.

    Attributes:
        tensors: one empty tensor for each tensor of `like`, of the same dtype. They keep the array
            of addresses alive, so they must live as long as the graph.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.tensors = [tensor.new_empty(0) for tensor in like]
        addresses(self.tensors)
        (self._addresses,) = _kept_on(self.tensors[0], "_zerocast_addresses").values()

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Let later replays use these tensors, which must have the number and sizes of the recorded
        ones.
        """
        on_host = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, pin_memory=True)
        self._addresses.copy_(on_host, non_blocking=True)


def few_or_many(tensors: Sequence[Tensor]) -> list[int] | int:
    """Return the addresses of a few tensors, which are passed as kernel arguments; for many,
    `addresses`.

    Few tensors may be temporary. An array that is stored on one of them would be copied to the
    device again for each call.
    """
    few = len(tensors) <= kernels.FEW_BASES
    return list(map(Tensor.data_ptr, tensors)) if few else addresses(tensors)


def work(kind: str, fmt: FormatSpec, table: Tensor) -> Work:
    """Return the work list of a table for one `kind` of work.

    `kind` is a kind of `kernels.ordinals` (amax, cast, scales, transpose, transpose_scales,
    adam_cast or adam_8bit_cast), or "weights", which is one thread block per weight and needs no
    list.
    """
    if kind == "weights":
        return table.data_ptr(), table.shape[0], 0, table.shape[0]
    work_lists = _kept_on(table, "_zerocast_work")
    key = (kind, str(fmt))
    if key not in work_lists:
        host = table.cpu()
        ordinals = kernels.ordinals(kind, format_of(fmt), extension.memory(host))
        work_lists[key] = _items(ordinals, table.device)
    items = work_lists[key]
    return table.data_ptr(), table.shape[0], items.data_ptr(), items.shape[0]


def partial_amaxes(table: Tensor) -> Tensor:
    """Return scratch memory for the tensor amaxes of a table's weights, f32 `[weights,
    PARTIAL_AMAXES]`.
    """
    kept = _kept_on(table, "_zerocast_partial_amaxes")
    if not kept:
        kept[()] = torch.empty(table.shape[0], kernels.PARTIAL_AMAXES, dtype=torch.float32, device=table.device)
    return kept[()]


def piece_work(pieces: Tensor) -> Work:
    """Return the work list for pieces of weights, int64 rows of `Piece`."""

    def count(row: list[int]) -> int:
        groups = moment_groups(row[Piece.START], row[Piece.NUMEL], row[Piece.COLUMNS])
        return -(-groups // int(kernels.MOMENT_GROUPS))

    return _work_of_rows(pieces, count)


def _work_of_rows(rows: Tensor, count: Callable[[list[int]], int]) -> Work:
    """Return the work list of rows that have `count(row)` thread blocks each."""
    work_lists = _kept_on(rows, "_zerocast_work")
    if () not in work_lists:
        work_lists[()] = _items([(0, count(row)) for row in rows.tolist()], rows.device)
    items = work_lists[()]
    return rows.data_ptr(), rows.shape[0], items.data_ptr(), items.shape[0]


def _items(ordinals: list[tuple[int, int]], device: torch.device) -> Tensor:
    """Return int32 `[blocks, 2]`: the table row and the ordinal of each thread block.

    `ordinals` has (first ordinal, count) for each row of the table.
    """
    first, count = torch.tensor(ordinals, dtype=torch.int64).view(-1, 2).unbind(1)
    rows = torch.repeat_interleave(torch.arange(len(count)), count)
    ordinal = torch.arange(len(rows)) + (first - (count.cumsum(0) - count))[rows]
    return torch.stack((rows, ordinal), -1).to(torch.int32).to(device)


def _kept_on(tensor: Tensor, name: str) -> dict[Any, Tensor]:
    """Return the dict stored on `tensor` as attribute `name`, whose tensors live as long as
    `tensor`.
    """
    kept: dict[Any, Tensor] = tensor.__dict__.setdefault(name, {})
    return kept
