"""What a launch needs beside its tensors, kept in device memory: addresses of bases, and which thread block does what.

Both are made once, kept on the tensors that they are made for and found there again, so that they live as long as a captured
graph that refers to those. So a step copies nothing to the device, and its host work does not grow with the number of weights.
Making work reads the table back, the only time that the host waits for the device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.backends import extension
from zerocast.formats import FormatSpec

_C = extension.load()

Work = tuple[int, int, int, int]  # addresses of the table and of (weight, ordinal) pairs, with the length of each
Stream = tuple[int, int]  # handle and device


_current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)  # without a Stream object, which takes ten times as long to make as the rest of a call


def stream_of(tensor: Tensor) -> Stream:
    """The current stream of the tensor's device."""
    index = tensor.get_device()
    return _current_stream(index), index


def addresses(tensors: Sequence[Tensor]) -> int:
    """The device address of the tensors' addresses; 0 for an empty list."""
    if not tensors:
        return 0
    values = tuple([tensor.data_ptr() for tensor in tensors])
    lists = _kept_on(tensors[0], "_zerocast_addresses")
    if values not in lists:
        lists[values] = torch.tensor(values, dtype=torch.int64).to(tensors[0].device)
    return int(lists[values].data_ptr())


def one_or_more(tensors: Sequence[Tensor]) -> int:
    """As `addresses`, but the address of an only tensor itself, marked as such: it may not live to be found again."""
    return tensors[0].data_ptr() | _C.cuda.ONLY_BASE if len(tensors) == 1 else addresses(tensors)


def work(kind: str, fmt: FormatSpec, table: Tensor) -> Work:
    """The thread blocks of a kind of work for a table: amax, cast, scales, transpose, transpose_scales; or weights, one each."""
    assert table.dtype == torch.int64 and table.is_contiguous(), table
    weights = table.shape[0]
    if kind == "weights":
        return table.data_ptr(), weights, 0, weights
    items = _items(
        (kind, str(fmt)),
        table,
        lambda host: _C.cuda.ordinals(kind, extension.format_of(fmt), (host.data_ptr(), weights)),
    )
    return table.data_ptr(), weights, items.data_ptr(), items.shape[0]


def partial_amaxes(table: Tensor) -> Tensor:
    """Scratch memory for the tensor amaxes of a table's weights, f32 `[weights, PARTIAL_AMAXES]`."""
    kept = _kept_on(table, "_zerocast_partial_amaxes")
    if not kept:
        kept[()] = torch.empty(table.shape[0], _C.cuda.PARTIAL_AMAXES, dtype=torch.float32, device=table.device)
    return kept[()]


def segment_work(segments: Tensor) -> Work:
    """The thread blocks for rows of (offset, numel, row of scalars)."""
    size = _C.cuda.SEGMENT_ELEMENTS
    items = _items(("segments", ""), segments, lambda host: [(0, -(-numel // size)) for numel in host[:, 1].tolist()])
    return segments.data_ptr(), segments.shape[0], items.data_ptr(), items.shape[0]


def _items(key: tuple[str, str], table: Tensor, ordinals: Callable[[Tensor], list[tuple[int, int]]]) -> Tensor:
    """int32 `[blocks, 2]`: for each thread block its row of the table and its ordinal, `ordinals` being (first, count) a row."""
    made = _kept_on(table, "_zerocast_work")
    if key not in made:
        first, count = torch.tensor(ordinals(table.cpu()), dtype=torch.int64).view(-1, 2).unbind(1)
        rows = torch.repeat_interleave(torch.arange(len(count)), count)
        ordinal = torch.arange(len(rows)) + (first - (count.cumsum(0) - count))[rows]
        made[key] = torch.stack((rows, ordinal), -1).to(torch.int32).to(table.device)
    return made[key]


def _kept_on(tensor: Tensor, name: str) -> dict[Any, Tensor]:
    kept: dict[Any, Tensor] = tensor.__dict__.setdefault(name, {})
    return kept
