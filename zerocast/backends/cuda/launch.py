"""What a launch needs beside its tensors, kept in device memory: addresses of bases, and which thread block does what.

Both are made once and found again, and live as long as the tensors that they were made for: a captured graph refers to them. So a
step copies nothing to the device, and its host work does not grow with the number of weights. Making work reads the table back, the
only time that the host waits for the device.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zerocast import extension
from zerocast.formats import FormatSpec

_C = extension.load()

Work = tuple[int, int, int, int]  # addresses of the table and of (weight, ordinal) pairs, with the length of each

_ITEMS: dict[tuple[str, str], WeakIdKeyDictionary] = {}  # by table, by kind of work and format
_ADDRESSES = WeakIdKeyDictionary()  # by first base, by address


@contextlib.contextmanager
def stream_of(tensor: Tensor) -> Iterator[int]:
    """The current stream of the tensor's device, which is the current device within."""
    with torch.cuda.device(tensor.device):
        yield torch.cuda.current_stream().cuda_stream


def addresses(tensors: Sequence[Tensor]) -> int:
    """The device address of the tensors' addresses; 0 for an empty list."""
    if not tensors:
        return 0
    values = tuple([tensor.data_ptr() for tensor in tensors])
    lists: dict[tuple[int, ...], Tensor] = _ADDRESSES.setdefault(tensors[0], {})
    if values not in lists:
        lists[values] = torch.tensor(values, dtype=torch.int64).to(tensors[0].device)
    return lists[values].data_ptr()


def work(kind: str, fmt: FormatSpec, table: Tensor) -> Work:
    """The thread blocks of a kind of work for a table: amax, cast, scales, transpose, transpose_scales, or weights, which need none."""
    assert table.dtype == torch.int64 and table.is_contiguous(), table
    weights = table.shape[0]
    if kind == "weights":
        return table.data_ptr(), weights, 0, weights
    items = _items(
        (kind, str(fmt)),
        table,
        lambda host: _C.cuda.block_counts(kind, extension.format_of(fmt), (host.data_ptr(), weights)),
    )
    return table.data_ptr(), weights, items.data_ptr(), items.shape[0]


def segment_work(segments: Tensor) -> tuple[int, int]:
    """(address of pairs, number of thread blocks) for rows of (offset, numel, row of scalars)."""
    size = _C.cuda.SEGMENT_ELEMENTS
    items = _items(("segments", ""), segments, lambda host: [-(-numel // size) for numel in host[:, 1].tolist()])
    return items.data_ptr(), items.shape[0]


def _items(key: tuple[str, str], table: Tensor, count: Callable[[Tensor], list[int]]) -> Tensor:
    """int32 `[blocks, 2]`: for each thread block its row of the table and its ordinal among those of that row."""
    made = _ITEMS.setdefault(key, WeakIdKeyDictionary())
    if table not in made:
        counts = torch.tensor(count(table.cpu()), dtype=torch.int64)
        rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
        ordinals = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
        made[table] = torch.stack((rows, ordinals), -1).to(torch.int32).to(table.device)
    items: Tensor = made[table]
    return items
