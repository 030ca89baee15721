"""Device memory that a launch needs besides its tensors: base addresses and work lists.

A work list tells each thread block which weight and which part of it to process. Addresses and work
lists are made once and stored on the tensors that they describe, so they live as long as a captured
graph that uses those tensors. A step then copies nothing to the device, and its host work does not
grow with the number of weights. Making a work list reads the table back, which is the only time
that the host waits for the device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.backends import extension
from zerocast.formats import FormatSpec

_C = extension.load()

# addresses of the table and of (weight, ordinal) pairs, with the length of each
Work = tuple[int, int, int, int]
Stream = tuple[int, int]  # handle and device


# a Stream object takes ten times as long to make as the rest of a call
_current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


def stream_of(tensor: Tensor) -> Stream:
    """The current stream of the tensor's device."""
    index = tensor.get_device()
    return _current_stream(index), index


def addresses(tensors: Sequence[Tensor]) -> int:
    """The device address of an array of the tensors' addresses; 0 for an empty list."""
    if not tensors:
        return 0
    values = tuple([tensor.data_ptr() for tensor in tensors])
    lists = _kept_on(tensors[0], "_zerocast_addresses")
    if values not in lists:
        on_host = torch.tensor(values, dtype=torch.int64, pin_memory=True)
        lists[values] = on_host.to(tensors[0].device, non_blocking=True)
    return int(lists[values].data_ptr())


class StandIns:
    """Tensors that a CUDA graph is recorded with in place of others, which lie elsewhere at every
    replay: the graph reads the addresses of these from one place, which `fill` writes.

    Attributes:
        tensors: as many as `like`, of the same dtype, without elements.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.tensors = [tensor.new_empty(0) for tensor in like]
        addresses(self.tensors)
        (self._addresses,) = _kept_on(self.tensors[0], "_zerocast_addresses").values()

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Let the replays to come use these, as many and as large as the ones before."""
        on_host = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, pin_memory=True)
        self._addresses.copy_(on_host, non_blocking=True)


def one_or_more(tensors: Sequence[Tensor]) -> int:
    """Like `addresses`, but a single tensor passes its own address, marked with ONLY_BASE.

    A single tensor may be temporary, and an array stored on it would be made anew each time.
    """
    return tensors[0].data_ptr() | _C.cuda.ONLY_BASE if len(tensors) == 1 else addresses(tensors)


def work(kind: str, fmt: FormatSpec, table: Tensor) -> Work:
    """The work list of a table for one `kind` of work.

    `kind` is amax, cast, scales, transpose or transpose_scales; "weights" is one thread block a
    weight and needs no list.
    """
    if kind == "weights":
        return table.data_ptr(), table.shape[0], 0, table.shape[0]
    made, key = _kept_on(table, "_zerocast_work"), (kind, str(fmt))
    if key not in made:
        host = table.cpu()
        ordinals = _C.cuda.ordinals(kind, extension.format_of(fmt), extension.memory(host))
        made[key] = _items(ordinals, table.device)
    items = made[key]
    return table.data_ptr(), table.shape[0], items.data_ptr(), items.shape[0]


def partial_amaxes(table: Tensor) -> Tensor:
    """Scratch memory for the tensor amaxes of a table's weights, f32
    `[weights, PARTIAL_AMAXES]`.
    """
    kept = _kept_on(table, "_zerocast_partial_amaxes")
    if not kept:
        kept[()] = torch.empty(table.shape[0], _C.cuda.PARTIAL_AMAXES, dtype=torch.float32, device=table.device)
    return kept[()]


def segment_work(segments: Tensor) -> Work:
    """The work list for segments, int64 rows of (offset, numel, row of scalars)."""
    made = _kept_on(segments, "_zerocast_work")
    if () not in made:
        size = _C.cuda.SEGMENT_ELEMENTS
        ordinals = [(0, -(-numel // size)) for numel in segments[:, 1].tolist()]
        made[()] = _items(ordinals, segments.device)
    items = made[()]
    return segments.data_ptr(), segments.shape[0], items.data_ptr(), items.shape[0]


def _items(ordinals: list[tuple[int, int]], device: torch.device) -> Tensor:
    """int32 `[blocks, 2]`: the table row and the ordinal of each thread block.

    `ordinals` has (first ordinal, count) for each row of the table.
    """
    first, count = torch.tensor(ordinals, dtype=torch.int64).view(-1, 2).unbind(1)
    rows = torch.repeat_interleave(torch.arange(len(count)), count)
    ordinal = torch.arange(len(rows)) + (first - (count.cumsum(0) - count))[rows]
    return torch.stack((rows, ordinal), -1).to(torch.int32).to(device)


def _kept_on(tensor: Tensor, name: str) -> dict[Any, Tensor]:
    kept: dict[Any, Tensor] = tensor.__dict__.setdefault(name, {})
    return kept
