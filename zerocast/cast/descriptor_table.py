"""DescriptorTable: where weights of one format and dtype lie, and what of them this rank owns, in
offsets into the storages that hold them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zerocast.backends import checks
from zerocast.backends.descriptor import BUFFER_COLUMNS, WIDTH, Column, check_rows
from zerocast.cast.partition import MasterShard
from zerocast.cast.storage import Places, StorageTable
from zerocast.formats import Block, Columnwise, FormatSpec, ScaleRule
from zerocast.formats.layout import Span, byte_range, whole_block_rows
from zerocast.weight import QuantizedWeight


@dataclass(frozen=True)
class TableKey:
    """The properties that all weights of a table share."""

    backend: str
    fmt: FormatSpec
    nominal: torch.dtype
    master: torch.dtype = torch.float32
    external_scaling_state: bool = False
    takes_updates: bool = True  # else somebody else steps the masters, before they are measured


@dataclass
class DescriptorTable:
    """One descriptor table with the storages that it points into. Add weights, then
    `put_on_device`.
    """

    key: TableKey
    device: torch.device
    table: Tensor = field(init=False)
    masters: StorageTable = field(init=False)
    buffers: dict[str, StorageTable] = field(init=False)
    # stages read all codes of a weight, and not those of its owned elements alone
    of_whole_weights: bool = False
    _rows: list[list[int]] = field(default_factory=list)
    _groups: list[int] = field(default_factory=list)  # parameter group by row

    def __post_init__(self) -> None:
        scale = torch.float32 if self.key.fmt.scale_rule is ScaleRule.FP32 else torch.uint8
        self.masters = StorageTable(self.key.master)
        self.buffers = {name: StorageTable(torch.float32) for name in ("amax", "scale", "amax_history")}
        self.buffers |= {name: StorageTable(scale) for name in ("rowwise_scale_inv", "columnwise_scale_inv")}
        self.buffers |= {name: StorageTable(torch.uint8) for name in ("rowwise_data", "columnwise_data")}

    def add(
        self, weight: QuantizedWeight, place: Sequence[int] = (0, 0), group: int = 0, shared: int = -1
    ) -> list[int]:
        """Append a weight of which this rank owns nothing; returns its row, for `set_span`. Its
        tensor amax is the one at `shared`, if that is larger.
        """
        row = self._row(weight.matrix_shape, place, group)
        if self.key.fmt.scale_rule is ScaleRule.TWO_LEVEL:
            row[Column.SHARED_AMAX] = shared
        for name, (base, offset) in BUFFER_COLUMNS.items():
            tensor = weight.state.buffers[name]
            # a tensor without elements stands for codes that are not kept
            if tensor is not None and tensor.numel():
                row[base], row[offset] = self.buffers[name].add(tensor)
        return row

    def add_master(
        self,
        master: Tensor,
        shape: Block,
        span: Span,
        place: Sequence[int],
        group: int,
        flag: int,
        codes: Tensor | None = None,
    ) -> None:
        """Append a flat master of the elements `span` of a matrix `shape`, with a base of its
        own and the place of its flag, for `adam_each`; with its own `codes`, u8, for `cast_each`.
        """
        row = self._row(shape, place, group)
        row[Column.NOT_FINITE] = flag
        row[Column.START], row[Column.NUMEL] = span.start, span.numel
        row[Column.MASTER_BASE], row[Column.MASTER_OFFSET] = self.masters.add_whole(master)
        if codes is not None:
            base, offset = self.buffers["rowwise_data"].add(codes)
            first, _ = byte_range(self.key.fmt, shape, span, self.key.nominal)
            row[Column.ROW_DATA_BASE], row[Column.ROW_DATA_OFFSET] = base, offset - first

    def _row(self, shape: Block, place: Sequence[int], group: int) -> list[int]:
        row = [-1] * WIDTH
        row[Column.ROWS], row[Column.COLUMNS] = shape
        row[Column.START] = row[Column.NUMEL] = 0
        row[Column.ROW_AMAX], row[Column.COLUMN_AMAX] = place[0], place[-1]
        self._rows.append(row)
        self._groups.append(group)
        return row

    def add_shard(
        self,
        shard: MasterShard,
        place: Sequence[int],
        group: int = 0,
        shared: int = -1,
        flag: int = -1,
    ) -> None:
        """Append a weight with what this rank owns of it, its parameter group, and the place of the
        flag that its masters are not finite.
        """
        row = self.add(shard.weight, place, group, shared)
        row[Column.NOT_FINITE] = flag
        if shard.master is not None:
            self.set_span(row, shard, shard.span, shard.master)
        if shard.cuts is not None:
            self._narrow(row, shard)

    def _narrow(self, row: list[int], shard: MasterShard) -> None:
        """Let a row stand for the rows of a weight whose scales this rank computes, as if they were
        a weight of their own.
        """
        (rows, columns), narrow = shard.weight.matrix_shape, shard.rows
        row[Column.ROWS] = narrow.numel
        row[Column.START] -= narrow.start * columns
        names = ["rowwise_data", "rowwise_scale_inv"]
        if shard.weight.format.columnwise is Columnwise.OWN_GRID:
            names += ["columnwise_data", "columnwise_scale_inv"]
        for name in names:
            tensor = shard.weight.state.buffers[name]
            assert tensor is not None, name
            row[BUFFER_COLUMNS[name][1]] += narrow.start * tensor.numel() // rows

    def set_span(self, row: list[int], shard: MasterShard, span: Span, master: Tensor) -> None:
        """Fill in the columns of an owned span, and of separate shard storage, whose first byte
        holds the shard's first element.
        """
        row[Column.START], row[Column.NUMEL] = span.start, span.numel
        row[Column.MASTER_BASE], row[Column.MASTER_OFFSET] = self.add_to_masters(master)
        data = shard.shard_data
        tensors: tuple[Tensor, ...] = () if data is None else data if isinstance(data, tuple) else (data,)
        first, _ = byte_range(self.key.fmt, shard.weight.shape, shard.span, shard.weight.dtype)
        for name, tensor in zip(("rowwise_data", "columnwise_data"), tensors, strict=False):
            base, offset = BUFFER_COLUMNS[name]
            row[base], row[offset] = self.buffers[name].add(tensor)
            row[offset] -= first

    def add_to_masters(self, master: Tensor) -> tuple[int, int]:
        """(base index, offset) of a master. A view stays where its base is; others, that lie in one
        storage too, may be given their own (`.data =`).
        """
        return self.masters.add(master, follow=not master._is_view())

    def add_pieces(self, other: "DescriptorTable", pieces: Callable[[Span, Span], Sequence[Span]]) -> None:
        """Append `pieces(owned span, the exchange blocks in it that are owned in whole)` of each
        weight of another table, in the storages of that one.
        """
        self.masters, self.buffers = other.masters, other.buffers
        for row, group in zip(other._rows, other._groups, strict=True):
            span = Span(row[Column.START], row[Column.START] + row[Column.NUMEL])
            whole = whole_block_rows(self.key.fmt, (row[Column.ROWS], row[Column.COLUMNS]), span)
            for piece in pieces(span, whole) if span.numel else ():
                if piece.numel:
                    of_piece = row.copy()
                    of_piece[Column.START], of_piece[Column.NUMEL] = piece.start, piece.numel
                    of_piece[Column.MASTER_OFFSET] += piece.start - span.start
                    self._rows.append(of_piece)
                    self._groups.append(group)

    def put_on_device(self) -> None:
        """Make tensors of the rows, for stages to read. ValueError for a row that reaches outside
        of the memory that there is.
        """
        masters, held = self.masters.tensors, {name: storages.tensors for name, storages in self.buffers.items()}
        fmt, nominal = self.key.fmt, self.key.nominal
        check_rows(fmt, nominal, self._rows, {"the master": masters}, held, self.of_whole_weights)
        self.table = torch.tensor(self._rows, dtype=torch.int64).view(-1, WIDTH).to(self.device)
        self._group_rows = torch.tensor(self._groups, dtype=torch.int64).to(self.device)
        owned = [row[Column.MASTER_OFFSET] + row[Column.NUMEL] for row in self._rows if row[Column.NUMEL]]
        groups = [group for row, group in zip(self._rows, self._groups, strict=True) if row[Column.NUMEL]]
        self._end, self._group_count = max(owned, default=0), max(groups, default=-1) + 1
        storages = [self.masters, *self.buffers.values()]
        followed = [tensor for one in storages for tensor in one.followed]
        bases = [tensor for one in storages for tensor in one.tensors]
        self._places = Places(followed, bases)
        known = {argument: held[name] for argument, name in checks.BUFFER_ARGUMENTS.items()}
        checks.know(self.table, {"masters": masters, **known})

    def moved(self) -> bool:
        """True if a storage was replaced since the table was made, or has another size."""
        return self._places.moved()

    def lies_like(self, other: "DescriptorTable") -> bool:
        """True if both tables describe the same weights in the same memory."""
        return (self.key, self._rows, self._groups, self._bases()) == (
            other.key,
            other._rows,
            other._groups,
            other._bases(),
        )

    def _bases(self) -> list[list[int]]:
        return [[t.data_ptr() for t in storages.tensors] for storages in (self.masters, *self.buffers.values())]
