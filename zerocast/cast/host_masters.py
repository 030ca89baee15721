"""Masters in host memory, of weights on another device: measured and cast there.

The CPU backend's bytes are those of every backend, so it does what a cast does with elements. The
device does the rest: it reduces, computes scales and rolls histories. Amaxes travel to the device
before the reduction and back after it; codes travel in pieces, from two buffers of the host of at
most `PIECE` elements each, of which one is filled while the other is copied. So 1 or half a byte an
element crosses the bus, and the device holds no master.

Of a byte with two codes of which one is owned, the other half is read from the device first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerocast.backends.descriptor import BUFFER_COLUMNS, Column
from zerocast.cast.adam_update import AdamUpdate
from zerocast.cast.partition import MasterShard
from zerocast.cast.tables import Places, TableKey, WeightTable, place_of_matrix
from zerocast.formats import Columnwise, FormatSpec
from zerocast.formats.layout import Span, amax_counts, byte_range

PIECE = 1 << 22  # elements, a multiple of two; of 4 bytes each at most
_HOST = torch.device("cpu")
_DIRECTIONS = ("rowwise_data", "columnwise_data")


def host_tensor(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate host memory, page-locked if that lets copies to `device` go on without a wait."""
    return torch.zeros(numel, dtype=dtype, pin_memory=device.type == "cuda")


def write_rounded(master: Tensor, rounded: Tensor) -> None:
    """Write a master in host memory into a tensor on a device, in that one's dtype, and wait.

    torch alone would round on the host, into memory that is not page-locked.
    """
    for there, here in zip(rounded.view(-1).split(PIECE), master.view(-1).split(PIECE), strict=True):
        there.copy_(here.to(there.device, non_blocking=True))
    if rounded.is_cuda:
        torch.cuda.current_stream(rounded.device).synchronize()


class HostTable(WeightTable):
    """A table of weights whose masters are on the host; a plan's other weights are in tables of the
    device. Its rows hold the addresses of the weights on their device, and own nothing.

    `packed` of a stage is on that device; `mirror` is a host tensor of its size, which all such
    tables of a plan share.
    """

    def __init__(self, key: TableKey, device: torch.device, mirror: Tensor) -> None:
        super().__init__(key, device)
        self._mirror = mirror
        self._shards: list[tuple[MasterShard, int, Sequence[int], int]] = []

    def add_shard(
        self,
        shard: MasterShard,
        place: Sequence[int],
        group: int = 0,
        shared: int = -1,
        flag: int = -1,
    ) -> None:
        """Append a weight, and what this rank owns of it for the host."""
        assert shard.cuts is None, shard
        for number, matrix in enumerate(shard.matrices()):
            of_matrix = place_of_matrix(shard.weight.format, shard.weight.shape, place, number)
            self._shards.append((matrix, shared, of_matrix, flag))
            self.add(matrix.weight, of_matrix, group, shared)

    def freeze(self) -> "HostTable":
        """The device's part, and tables of the host's."""
        super().freeze()
        self._state = {name: host_tensor(len(self._shards), torch.float32, self.device) for name in ("amax", "scale")}
        self._measured, self._ranges = self._of_masters(), _merged(self._measured_places())
        self._read = [*self._ranges, *_merged(Span(at, at + 1) for _, at, *_ in self._shards if at >= 0)]
        self._pieces = list(self._cut())
        size = max((piece.numel for piece in self._pieces), default=0)
        self._staging = [host_tensor(size, torch.uint8, self.device) for _ in range(min(2, len(self._pieces)))]
        for number, piece in enumerate(self._pieces):
            piece.put_in(self._staging[number % 2])
        self._copied: list[Any] = [None, None]
        self._stored = Places(tensor for shard, *_ in self._shards for tensor in shard.stored)
        return self

    def moved(self) -> bool:
        """True if a weight, a master or the caller's storage was replaced since then."""
        return super().moved() or self._measured.moved() or self._stored.moved()

    def measure(self, packed: Tensor, update: AdamUpdate | None = None, skip: Tensor | None = None) -> None:
        """Amaxes of the masters, brought to the device."""
        assert update is None, "CastPlan.launch refuses it"
        for span in self._ranges:
            self._mirror[span.start : span.stop].zero_()
        self._measured.measure(self._mirror)
        self._send(packed)

    def cast_rest(self, packed: Tensor, update: AdamUpdate | None, skip: Tensor | None) -> None:
        """Codes of the owned elements, by what the device has reduced and computed."""
        if not self._pieces or (skip is not None and bool(skip)):
            return
        self._fetch(packed)
        for name, known in self._state.items():
            tensors = [shard.weight.state.buffers[name] for shard, *_ in self._shards]
            held = [tensor for tensor in tensors if tensor is not None]
            if held:
                known.copy_(torch.cat([tensor.view(-1) for tensor in held]))
        for number, piece in enumerate(self._pieces):
            copied = self._copied[number % 2]
            if copied is not None:
                copied.synchronize()
            piece.cast(self._mirror)
            if self.device.type == "cuda":
                self._copied[number % 2] = torch.cuda.current_stream(self.device).record_event()

    def _send(self, packed: Tensor) -> None:
        for span in self._ranges:
            packed[span.start : span.stop].copy_(self._mirror[span.start : span.stop], non_blocking=True)

    def _fetch(self, packed: Tensor) -> None:
        for span in self._read:  # these wait for the device, and for copies out of the mirror
            self._mirror[span.start : span.stop].copy_(packed[span.start : span.stop])

    def _measured_places(self) -> Iterator[Span]:
        """The places of the amaxes of each weight in the packed buffer, and of its flag."""
        for shard, _, place, flag in self._shards:
            yield Span(place[0], place[0] + sum(amax_counts(self.key.fmt, *shard.weight.matrix_shape)))
            yield Span(flag, flag + (flag >= 0))

    def _host_table(self) -> WeightTable:
        key = TableKey("cpu", self.key.fmt, self.key.nominal, self.key.master)
        return WeightTable(key, _HOST)

    def _row_on_host(self, table: WeightTable, number: int, span: Span) -> list[int]:
        """A row for some elements of a weight, with its tensor amax and scale on the host."""
        shard, shared, place, flag = self._shards[number]
        row = table.add_row(shard.weight.matrix_shape, place, shared=shared)
        row[Column.NOT_FINITE] = flag
        row[Column.START], row[Column.NUMEL] = span.start, span.numel
        if shard.master is not None:
            base, offset = table.add_to_masters(shard.master)
            row[Column.MASTER_BASE], row[Column.MASTER_OFFSET] = base, offset + span.start - shard.span.start
        for name, known in self._state.items():
            if shard.weight.state.buffers[name] is not None:
                base_at, offset_at = BUFFER_COLUMNS[name]
                row[base_at], row[offset_at] = table.buffers[name].add(known[number : number + 1])
        return row

    def _of_masters(self) -> WeightTable:
        """The table by which all masters are measured."""
        table = self._host_table()
        for number, (shard, *_) in enumerate(self._shards):
            self._row_on_host(table, number, shard.span)
        return table.freeze()

    def _cut(self) -> Iterator["_Piece"]:
        """Pieces of at most PIECE elements, of one weight or several."""
        piece, room = _Piece(self._host_table()), PIECE
        for number, (shard, *_) in enumerate(self._shards):
            start = shard.span.start
            while start < shard.span.stop:
                stop = min(shard.span.stop, start + room)
                if stop < shard.span.stop:
                    stop -= stop % 2  # no byte in two pieces
                if stop > start:
                    row = self._row_on_host(piece.table, number, Span(start, stop))
                    piece.add(row, shard, self.key.fmt, Span(start, stop))
                    room -= stop - start
                if stop < shard.span.stop or room < 2:
                    yield piece
                    piece, room = _Piece(self._host_table()), PIECE
                start = max(start, stop)
        if piece.parts:
            yield piece


@dataclass
class _Piece:
    """Some owned elements that are cast into host memory together, and where their codes go.

    `parts` are (bytes on the device, where they lie in the staging buffer); `shared` those of
    them, bytes with two codes, of which another one is not written.
    """

    table: WeightTable
    parts: list[tuple[Tensor, int]] = field(default_factory=list)
    shared: list[tuple[Tensor, int]] = field(default_factory=list)
    numel: int = 0
    _data: list[tuple[list[int], str, int]] = field(default_factory=list)

    def add(self, row: list[int], shard: MasterShard, fmt: FormatSpec, span: Span) -> None:
        """Append the elements `span` of a weight, of which `row` is a row of the table."""
        first, last = byte_range(fmt, shard.weight.matrix_shape, span, shard.weight.dtype)
        origin, _ = byte_range(fmt, shard.weight.matrix_shape, shard.span, shard.weight.dtype)
        stored = shard.stored
        for direction in range(2 if fmt.columnwise is Columnwise.OWN_GRID else 1):
            name = _DIRECTIONS[direction]
            whole = stored[direction] if stored else shard.weight.state.buffers[name]
            begins = origin if stored else 0
            self.numel += -self.numel % 16 + first % 16  # as bytes lie on the device
            assert whole is not None, name
            codes = whole.detach().view(-1).view(torch.uint8)[first - begins : last - begins]
            self.parts.append((codes, self.numel))
            self._data.append((row, name, self.numel - first))
            if fmt.elements_per_byte == 2:
                if span.start % 2:
                    self.shared.append((codes[:1], self.numel))
                if span.stop % 2:
                    self.shared.append((codes[-1:], self.numel + last - first - 1))
            self.numel += last - first

    def put_in(self, staging: Tensor) -> None:
        """Let the codes be written into `staging`, and prepare the stage."""
        self._staging = staging
        for row, name, offset in self._data:
            base_at, offset_at = BUFFER_COLUMNS[name]
            row[base_at], begins = self.table.buffers[name].add(staging)
            row[offset_at] = begins + offset
        self.table.freeze()

    def cast(self, packed: Tensor) -> None:
        """Cast into the staging buffer, and begin the copies of it to the device."""
        for codes, at in self.shared:
            self._staging[at : at + 1].copy_(codes)
        self.table.partial_cast(packed, None)
        for codes, at in self.parts:
            codes.copy_(self._staging[at : at + codes.numel()], non_blocking=True)


def _merged(spans: Iterator[Span]) -> list[Span]:
    """The same places as few spans."""
    found: list[Span] = []
    for span in sorted((span for span in spans if span.numel), key=lambda span: span.start):
        if found and span.start <= found[-1].stop:
            found[-1] = Span(found[-1].start, max(found[-1].stop, span.stop))
        else:
            found.append(span)
    return found
