"""Masters in CPU memory, of weights on another device: measured and cast on the CPU.

All backends make the same bytes, so the CPU backend measures and casts the elements. The device
reduces amaxes, computes scales and rolls histories. Amaxes are copied to the device before the
reduction and back after it. Codes are copied in pieces of at most `PIECE` elements through two
buffers in CPU memory: one is filled while the other is copied. So one byte per element or half of
one crosses the bus, and the device stores no master.

If a rank owns one of the two codes of a byte, the byte is read from the device first.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerocast.backends.descriptor import BUFFER_COLUMNS, Column
from zerocast.cast.adam_update import AdamUpdate
from zerocast.cast.partition import MasterShard
from zerocast.cast.tables import StorageSnapshot, TableKey, WeightTable, amax_offsets_of_matrix
from zerocast.formats import Columnwise, FormatSpec
from zerocast.formats.layout import Span, amax_counts, byte_range

# Elements that are staged together, an even number. Each has 4 bytes at most.
PIECE = 1 << 22


def cpu_tensor(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate CPU memory, page-locked if that lets copies to `device` run without a wait."""
    return torch.zeros(numel, dtype=dtype, pin_memory=device.type == "cuda")


def write_rounded(master: Tensor, rounded: Tensor) -> None:
    """Round a master in CPU memory to the dtype of a tensor on a device, write it there, and wait.

    The device rounds. `rounded.copy_(master)` would round on the host, into memory that is not
    page-locked.
    """
    for on_device, on_cpu in zip(rounded.view(-1).split(PIECE), master.view(-1).split(PIECE), strict=True):
        on_device.copy_(on_cpu.to(on_device.device, non_blocking=True))
    if rounded.is_cuda:
        torch.cuda.current_stream(rounded.device).synchronize()


class _CpuShard(NamedTuple):
    """A matrix whose master is in CPU memory, with its offsets in the packed amaxes.

    Attributes:
        shard: the matrix, and the elements that this rank owns.
        amax_offsets: the offsets of its rowwise amaxes, and of its columnwise amaxes if it has a
            separate columnwise grid.
        shared: the offset of the amax that it shares with other weights. -1 for none.
        flag: the offset of the number that becomes 1 if its master is not finite. -1 for none.
    """

    shard: MasterShard
    amax_offsets: Sequence[int]
    shared: int
    flag: int


class CpuTable(WeightTable):
    """A table of weights whose masters are in CPU memory. The other weights of a plan are in tables
    of the device.

    The rows of this table have the addresses of the weights on their device and own no elements.
    Tables of the CPU backend measure and cast the masters.

    Args:
        key: the properties that all weights have in common.
        device: the device of the weights and of the packed amaxes.
        mirror: a CPU tensor of the size of the packed amaxes, which all such tables of a plan
            share.
    """

    def __init__(self, key: TableKey, device: torch.device, mirror: Tensor) -> None:
        super().__init__(key, device)
        self._mirror = mirror
        self._shards: list[_CpuShard] = []

    def add_shard(
        self,
        shard: MasterShard,
        amax_offsets: Sequence[int],
        group: int = 0,
        shared: int = -1,
        flag: int = -1,
    ) -> None:
        """Append a weight with the elements of it that this rank owns in CPU memory."""
        assert shard.cuts is None, shard
        for number, matrix in enumerate(shard.matrices()):
            of_matrix = amax_offsets_of_matrix(shard.weight.format, shard.weight.shape, amax_offsets, number)
            self._shards.append(_CpuShard(matrix, of_matrix, shared, flag))
            self.add(matrix.weight, of_matrix, group, shared)

    def freeze(self) -> "CpuTable":
        """Make the table of the device, and the tables by which the CPU measures and casts."""
        super().freeze()
        # Copies of the weights' amaxes and scales, one number for each row.
        self._state = {name: cpu_tensor(len(self._shards), torch.float32, self.device) for name in ("amax", "scale")}
        self._masters_table = self._host_table()
        for number, host_shard in enumerate(self._shards):
            self._add_host_row(self._masters_table, number, host_shard.shard.span)
        self._masters_table.freeze()
        # The parts of the packed amaxes that this table writes, and those that its casts read.
        self._measured = _merged(self._measured_spans())
        shared = _merged(Span(each.shared, each.shared + 1) for each in self._shards if each.shared >= 0)
        self._reduced = [*self._measured, *shared]
        self._pieces = list(self._cut_into_pieces())
        size = max((piece.nbytes for piece in self._pieces), default=0)
        staging = [cpu_tensor(size, torch.uint8, self.device) for _ in range(min(2, len(self._pieces)))]
        for number, piece in enumerate(self._pieces):
            piece.stage_in(staging[number % 2])
        # For each staging buffer, an event behind the last copy out of it.
        self._copied: list[Any] = [None, None]
        stored = StorageSnapshot(tensor for each in self._shards for tensor in each.shard.stored)
        self.snapshot = StorageSnapshot.joined((self.snapshot, self._masters_table.snapshot, stored))
        return self

    def measure(self, packed: Tensor, update: AdamUpdate | None = None, skip: Tensor | None = None) -> None:
        """Measure the masters on the CPU, and copy their amaxes to the device."""
        assert update is None, "CastPlan.launch refuses it"
        for span in self._measured:
            self._mirror[span.start : span.stop].zero_()
        self._masters_table.measure(self._mirror)
        for span in self._measured:
            packed[span.start : span.stop].copy_(self._mirror[span.start : span.stop], non_blocking=True)

    def cast_rest(self, packed: Tensor, update: AdamUpdate | None, skip: Tensor | None) -> None:
        """Write the codes of the owned elements, by reduced amaxes and the scales of the device."""
        if not self._pieces or (skip is not None and bool(skip)):
            return
        # These copies wait for the device, and for the copies that `measure` began.
        for span in self._reduced:
            self._mirror[span.start : span.stop].copy_(packed[span.start : span.stop])
        for name, on_cpu in self._state.items():
            buffers = [each.shard.weight.state.buffers[name] for each in self._shards]
            on_device = [buffer.view(-1) for buffer in buffers if buffer is not None]
            if on_device:
                on_cpu.copy_(torch.cat(on_device))
        for number, piece in enumerate(self._pieces):
            copied = self._copied[number % 2]
            if copied is not None:
                copied.synchronize()
            piece.cast(self._mirror)
            if self.device.type == "cuda":
                self._copied[number % 2] = torch.cuda.current_stream(self.device).record_event()

    def _measured_spans(self) -> Iterator[Span]:
        """Yield the offsets of the amaxes of each matrix in the packed buffer, and of its flag."""
        for shard, amax_offsets, _, flag in self._shards:
            yield Span(amax_offsets[0], amax_offsets[0] + sum(amax_counts(self.key.fmt, *shard.weight.matrix_shape)))
            yield Span(flag, flag + (flag >= 0))

    def _host_table(self) -> WeightTable:
        return WeightTable(TableKey("cpu", self.key.fmt, self.key.nominal, self.key.master), torch.device("cpu"))

    def _add_host_row(self, table: WeightTable, number: int, span: Span) -> list[int]:
        """Add a row for some elements of a matrix, whose tensor amax and scale are in CPU
        memory.
        """
        shard, amax_offsets, shared, flag = self._shards[number]
        row = table.add_row(shard.weight.matrix_shape, amax_offsets, shared=shared)
        row[Column.NOT_FINITE] = flag
        row[Column.START], row[Column.NUMEL] = span.start, span.numel
        if shard.master is not None:
            base, offset = table.add_to_masters(shard.master)
            row[Column.MASTER_BASE], row[Column.MASTER_OFFSET] = base, offset + span.start - shard.span.start
        for name, on_cpu in self._state.items():
            if shard.weight.state.buffers[name] is not None:
                base_at, offset_at = BUFFER_COLUMNS[name]
                row[base_at], row[offset_at] = table.buffers[name].add(on_cpu[number : number + 1])
        return row

    def _cut_into_pieces(self) -> Iterator["_Piece"]:
        """Yield pieces of at most PIECE elements. A piece may have elements of several matrices."""
        piece, free = _Piece(self._host_table()), PIECE
        for number, (shard, *_) in enumerate(self._shards):
            start = shard.span.start
            while start < shard.span.stop:
                stop = min(shard.span.stop, start + free)
                if stop < shard.span.stop:
                    # No byte is in two pieces.
                    stop -= stop % 2
                if stop > start:
                    row = self._add_host_row(piece.table, number, Span(start, stop))
                    piece.add(row, shard, self.key.fmt, Span(start, stop))
                    free -= stop - start
                if stop < shard.span.stop or free < 2:
                    yield piece
                    piece, free = _Piece(self._host_table()), PIECE
                start = max(start, stop)
        if piece.parts:
            yield piece


@dataclass
class _Piece:
    """Some owned elements that are cast together into a staging buffer in CPU memory.

    Attributes:
        table: a row for each matrix that has elements here.
        parts: pairs of bytes on the device and their offset in the staging buffer.
        shared_bytes: the bytes that have a code of this rank and one of another rank.
        nbytes: the size of all parts.
    """

    table: WeightTable
    parts: list[tuple[Tensor, int]] = field(default_factory=list)
    shared_bytes: list[tuple[Tensor, int]] = field(default_factory=list)
    nbytes: int = 0
    # (row, buffer, offset in the staging buffer at which byte 0 of the matrix would be)
    _origins: list[tuple[list[int], str, int]] = field(default_factory=list)

    def add(self, row: list[int], shard: MasterShard, fmt: FormatSpec, span: Span) -> None:
        """Append the elements `span` of a matrix, for which the table has this `row`."""
        first, last = byte_range(fmt, shard.weight.matrix_shape, span, shard.weight.dtype)
        for direction, name in enumerate(("rowwise_data", "columnwise_data")):
            if direction == 1 and fmt.columnwise is not Columnwise.OWN_GRID:
                break
            stored: Tensor | None
            if shard.stored:
                # Storage of the caller begins with the byte of the first owned element.
                stored = shard.stored[direction]
                origin, _ = byte_range(fmt, shard.weight.matrix_shape, shard.span, shard.weight.dtype)
            else:
                stored, origin = shard.weight.state.buffers[name], 0
            assert stored is not None, name
            codes = stored.detach().view(-1).view(torch.uint8)[first - origin : last - origin]
            # A copy is fastest if both sides have the same alignment.
            self.nbytes += -self.nbytes % 16 + first % 16
            self.parts.append((codes, self.nbytes))
            self._origins.append((row, name, self.nbytes - first))
            if fmt.elements_per_byte == 2:
                if span.start % 2:
                    self.shared_bytes.append((codes[:1], self.nbytes))
                if span.stop % 2:
                    self.shared_bytes.append((codes[-1:], self.nbytes + last - first - 1))
            self.nbytes += last - first

    def stage_in(self, staging: Tensor) -> None:
        """Let the table write the codes into `staging`, and freeze it."""
        self._staging = staging
        for row, name, origin in self._origins:
            base_at, offset_at = BUFFER_COLUMNS[name]
            row[base_at], begin = self.table.buffers[name].add(staging)
            row[offset_at] = begin + origin
        self.table.freeze()

    def cast(self, packed: Tensor) -> None:
        """Cast into the staging buffer, and begin the copies of it to the device."""
        for codes, offset in self.shared_bytes:
            self._staging[offset : offset + 1].copy_(codes)
        self.table.partial_cast(packed, None)
        for codes, offset in self.parts:
            codes.copy_(self._staging[offset : offset + codes.numel()], non_blocking=True)


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Return the same offsets as few spans."""
    merged: list[Span] = []
    for span in sorted((span for span in spans if span.numel), key=lambda span: span.start):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return merged
