"""WeightTable: weights of one format and dtype, so that a stage is one call for all of them.

A stage is given the storages that hold the weights, and a descriptor table of offsets into them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from zerocast.backends import ops
from zerocast.backends.descriptor import WIDTH, Column
from zerocast.cast.adam_update import AdamUpdate
from zerocast.cast.partition import MasterShard
from zerocast.cast.storage import StorageTable
from zerocast.formats import AmaxPolicy, Block, Columnwise, FormatSpec, ScaleRule
from zerocast.formats.layout import Span, byte_range, whole_block_rows
from zerocast.weight import QuantizedWeight

_BUFFER_COLUMNS = {
    "rowwise_data": (Column.ROW_DATA_BASE, Column.ROW_DATA_OFFSET),
    "rowwise_scale_inv": (Column.ROW_SCALE_BASE, Column.ROW_SCALE_OFFSET),
    "columnwise_data": (Column.COLUMN_DATA_BASE, Column.COLUMN_DATA_OFFSET),
    "columnwise_scale_inv": (Column.COLUMN_SCALE_BASE, Column.COLUMN_SCALE_OFFSET),
    "amax": (Column.AMAX_BASE, Column.AMAX_OFFSET),
    "scale": (Column.SCALE_BASE, Column.SCALE_OFFSET),
    "amax_history": (Column.HISTORY_BASE, Column.HISTORY_OFFSET),
}
# the arguments of the stages that are such buffers
_BUFFER_ARGUMENTS = {
    "row_data": "rowwise_data",
    "row_scales": "rowwise_scale_inv",
    "column_data": "columnwise_data",
    "column_scales": "columnwise_scale_inv",
    "amaxes": "amax",
    "scales": "scale",
    "histories": "amax_history",
}


@dataclass(frozen=True)
class TableKey:
    """The properties that all weights of a table share."""

    backend: str
    fmt: FormatSpec
    nominal: torch.dtype
    master: torch.dtype = torch.float32
    external_scaling_state: bool = False
    is_backward: bool = False  # `fmt` is that of the columnwise buffers, of a format of two
    takes_updates: bool = True  # else somebody else steps the masters, before they are measured


@dataclass
class WeightTable:
    """One descriptor table with the storages that it points into. Add weights, then `freeze`,
    then call stages.
    """

    key: TableKey
    device: torch.device
    table: Tensor = field(init=False)
    masters: StorageTable = field(init=False)
    buffers: dict[str, StorageTable] = field(init=False)
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
        for name, (base, offset) in _BUFFER_COLUMNS.items():
            tensor = weight.state.half(self.key.is_backward).get(name)
            if tensor is not None:
                row[base], row[offset] = self.buffers[name].add(tensor)
        return row

    def add_master(
        self, master: Tensor, shape: Block, span: Span, place: Sequence[int], group: int, codes: Tensor | None = None
    ) -> None:
        """Append a flat master of the elements `span` of a matrix `shape`, with a base of its
        own, for `adam_each`; with its own `codes`, u8, for `cast_each`.
        """
        row = self._row(shape, place, group)
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

    def add_shard(self, shard: MasterShard, place: Sequence[int], group: int = 0, shared: int = -1) -> None:
        """Append a weight with what this rank owns of it, and its parameter group."""
        row = self.add(shard.weight, place, group, shared)
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
            row[_BUFFER_COLUMNS[name][1]] += narrow.start * tensor.numel() // rows

    def set_span(self, row: list[int], shard: MasterShard, span: Span, master: Tensor) -> None:
        """Fill in the columns of an owned span, and of separate shard storage, whose first byte
        holds the shard's first element.
        """
        row[Column.START], row[Column.NUMEL] = span.start, span.numel
        row[Column.MASTER_BASE], row[Column.MASTER_OFFSET] = self.masters.add(master)
        data = shard.shard_data
        tensors: tuple[Tensor, ...] = () if data is None else data if isinstance(data, tuple) else (data,)
        if shard.weight.format.backward:
            tensors = tensors[self.key.is_backward :][:1]
        first, _ = byte_range(self.key.fmt, shard.weight.shape, shard.span, shard.weight.dtype)
        for name, tensor in zip(("rowwise_data", "columnwise_data"), tensors, strict=False):
            base, offset = _BUFFER_COLUMNS[name]
            row[base], row[offset] = self.buffers[name].add(tensor)
            row[offset] -= first

    def freeze(self) -> "WeightTable":
        """Put the table on the device and prepare the stages."""
        self.table = torch.tensor(self._rows, dtype=torch.int64).view(-1, WIDTH).to(self.device)
        self._group_rows = torch.tensor(self._groups, dtype=torch.int64).to(self.device)
        owned = [
            [row[Column.MASTER_OFFSET], row[Column.NUMEL], group]
            for row, group in zip(self._rows, self._groups, strict=True)
            if row[Column.NUMEL]
        ]
        self._end = max((offset + numel for offset, numel, _ in owned), default=0)
        self._segments = torch.tensor(owned, dtype=torch.int64).view(-1, 3).to(self.device)
        self._first = [tensor for storages in (self.masters, *self.buffers.values()) for tensor in storages.first]
        self._addresses = [tensor.data_ptr() for tensor in self._first]
        self._partial_amax = self._bind(ops.partial_amax)
        self._adam_amax = self._bind(ops.adam_amax)
        self._adam_cast = self._bind(ops.adam_cast)
        self._choose_scales = self._bind(ops.choose_scales)
        self._compute_scales = self._bind(ops.compute_scales)
        self._partial_cast = self._bind(ops.partial_cast)
        self._roll_history = self._bind(ops.roll_history)
        self._transpose = self._bind(ops.transpose)
        return self

    def moved(self) -> bool:
        """True if a storage was replaced since the table was made."""
        return [tensor.data_ptr() for tensor in self._first] != self._addresses

    def lies_like(self, other: "WeightTable") -> bool:
        """True if both tables describe the same weights in the same memory."""
        return (self.key, self._rows, self._groups, self._bases()) == (
            other.key,
            other._rows,
            other._groups,
            other._bases(),
        )

    def _bases(self) -> list[list[int]]:
        return [[t.data_ptr() for t in storages.tensors] for storages in (self.masters, *self.buffers.values())]

    def _bind(self, stage: ops.Stage) -> Callable[..., None]:
        """The stage with all that is the same in every cast."""
        known: dict[str, Any] = {
            "nominal": self.key.nominal,
            "masters": self.masters.tensors,
            "table": self.table,
            "groups": self._group_rows,
        }
        known |= {argument: self.buffers[name].tensors for argument, name in _BUFFER_ARGUMENTS.items()}
        taken = {name: known[name] for name in stage.arguments if name in known}
        return stage.bind(self.key.backend, str(self.key.fmt), **taken)

    def measure(self, packed: Tensor, update: AdamUpdate | None, skip: Tensor | None) -> None:
        """Amaxes of the blocks that this rank owns elements of, after an `update` of the masters if
        there is one. `cast_rest` with the same update writes what codes it leaves.
        """
        if update is None or not self._is_updated:
            self.partial_amax(packed)
        elif self.key.fmt.casts_in_one_pass:
            self.adam_cast(update, packed, skip)
        else:
            self.adam_amax(update, packed, skip)

    @property
    def _is_updated(self) -> bool:
        """True if an update of the masters is taken here, once for a format of two."""
        return self.key.takes_updates and not self.key.is_backward

    def cast_rest(self, packed: Tensor, update: AdamUpdate | None, skip: Tensor | None) -> None:
        """The codes that are not written yet, by reduced amaxes."""
        if update is None or not self._is_updated or not self.key.fmt.casts_in_one_pass:
            self.partial_cast(packed, skip)
        else:
            self.cast_cut_rows(packed, skip)

    def partial_amax(self, packed: Tensor) -> None:
        """Amaxes of the blocks that this rank owns elements of."""
        if self.key.fmt.amax_policy is not AmaxPolicy.NONE and self.masters.tensors:
            self._partial_amax(packed=packed)

    def adam_amax(self, update: AdamUpdate, packed: Tensor, skip: Tensor | None) -> None:
        """Adam on the masters owned here, and in the same pass the amaxes of what they become,
        where the format has amaxes.
        """
        if not self.masters.tensors:
            return
        master = self._flat_master(update)
        if self.key.fmt.amax_policy is AmaxPolicy.NONE:
            ops.adam_step(
                self.key.backend,
                master=master,
                grad=update.grad,
                exp_avg=update.exp_avg,
                exp_avg_sq=update.exp_avg_sq,
                segments=self._segments,
                scalars=update.scalars,
                clip=update.clip,
                skip=skip,
            )
            return
        lists = [update.grad], [update.exp_avg], [update.exp_avg_sq]
        self.adam_each(*lists, scalars=update.scalars, clip=update.clip, packed=packed, skip=skip)

    def adam_cast(self, update: AdamUpdate, packed: Tensor, skip: Tensor | None) -> None:
        """Adam on the masters owned here and the amaxes of what they become, and the codes of the
        rows of blocks that are owned in whole, in one pass. For `key.fmt.casts_in_one_pass`.

        Of the rows of blocks that a boundary cuts, `cast_cut_rows` writes the codes, once their
        amaxes are reduced.
        """
        if self.masters.tensors:
            self._flat_master(update)
            lists = [update.grad], [update.exp_avg], [update.exp_avg_sq]
            self.cast_each(*lists, scalars=update.scalars, clip=update.clip, packed=packed, skip=skip)

    def cast_cut_rows(self, packed: Tensor, skip: Tensor | None) -> None:
        """The codes of the rows of blocks that a boundary cuts, by reduced amaxes."""
        if self.cut_rows:
            self.cut_rows.partial_cast(packed, skip)

    def _flat_master(self, update: AdamUpdate) -> Tensor:
        """The one tensor that all masters are views of; those of the update lie alike, and moments
        end where masters begin that take none.
        """
        assert len(self.masters.tensors) == 1 and self.key.master is torch.float32, self.key
        (master,) = self.masters.tensors
        moments = update.exp_avg, update.exp_avg_sq
        assert update.grad.numel() == master.numel(), update.grad.shape
        assert all(t.numel() >= self._end for t in moments), [t.shape for t in moments]
        return master

    @cached_property
    def _whole_rows(self) -> "WeightTable | None":
        """The rows of exchange blocks that this rank owns in whole."""
        return self._part(lambda span, whole: (whole,))

    @cached_property
    def cut_rows(self) -> "WeightTable | None":
        """What this rank owns of rows of exchange blocks that a boundary cuts, of which `adam_cast`
        and `cast_each` write no codes; None without any.
        """
        return self._part(lambda span, whole: (Span(span.start, whole.start), Span(whole.stop, span.stop)))

    def _part(self, pieces: Callable[[Span, Span], Sequence[Span]]) -> "WeightTable | None":
        """The table of some pieces of the owned spans, in the same storages; None without any."""
        part = WeightTable(self.key, self.device)
        part.masters, part.buffers = self.masters, self.buffers
        for row, group in zip(self._rows, self._groups, strict=True):
            span = Span(row[Column.START], row[Column.START] + row[Column.NUMEL])
            whole = whole_block_rows(self.key.fmt, (row[Column.ROWS], row[Column.COLUMNS]), span)
            for piece in pieces(span, whole) if span.numel else ():
                if piece.numel:
                    of_piece = row.copy()
                    of_piece[Column.START], of_piece[Column.NUMEL] = piece.start, piece.numel
                    of_piece[Column.MASTER_OFFSET] += piece.start - span.start
                    part._rows.append(of_piece)
                    part._groups.append(group)
        return part.freeze() if part._rows else None

    def adam_each(
        self,
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        *,
        scalars: Tensor,
        clip: Tensor,
        packed: Tensor,
        skip: Tensor | None = None,
    ) -> None:
        """Adam on masters that have gradients and moments of their own, flat and as large as they
        are; amaxes into `packed`.

        `scalars` and `clip` are those of an AdamUpdate.
        """
        self._adam_amax(
            grads=grads,
            exp_avgs=exp_avgs,
            exp_avg_sqs=exp_avg_sqs,
            scalars=scalars,
            clip=clip,
            packed=packed,
            skip=skip,
        )

    def cast_each(
        self,
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        *,
        scalars: Tensor,
        clip: Tensor,
        packed: Tensor,
        skip: Tensor | None = None,
    ) -> None:
        """The same, and as `adam_cast` the codes of the rows of blocks that are owned in whole."""
        state: dict[str, Any] = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
        state |= {"scalars": scalars, "clip": clip, "packed": packed, "skip": skip}
        if self._whole_rows:
            self._whole_rows._adam_cast(**state)
        if self.cut_rows:
            self.cut_rows._adam_amax(**state)

    def choose_scales(self, packed: Tensor) -> None:
        """The choices of the blocks that this rank owns every element of, from reduced amaxes."""
        if self.key.fmt.chooses_scales and self.masters.tensors:
            self._choose_scales(packed=packed)

    def compute_scales(self, packed: Tensor, skip: Tensor | None) -> None:
        """Scale buffers and tensor amaxes, the same on every rank."""
        if self.key.fmt.scale_rule is not ScaleRule.NONE:
            self._compute_scales(packed=packed, skip=skip)

    def partial_cast(self, packed: Tensor, skip: Tensor | None) -> None:
        """Codes of the owned elements."""
        if self.masters.tensors:
            self._partial_cast(packed=packed, skip=skip)

    def roll_history(self, skip: Tensor | None) -> None:
        """Delayed scaling: the scale of the next cast, unless whoever keeps the history sets it."""
        if self.key.fmt.amax_policy is AmaxPolicy.DELAYED and not self.key.external_scaling_state:
            self._roll_history(skip=skip)

    def transpose(self) -> None:
        """Columnwise copies from the rowwise bytes."""
        self._transpose()


class WeightTables(dict[TableKey, WeightTable]):
    """Tables by key, each made when its first weight arrives."""

    def __init__(self, device: torch.device, backend: str) -> None:
        super().__init__()
        self._device, self._backend = device, backend

    def of(
        self, weight: QuantizedWeight, master: torch.dtype = torch.float32, half: int = 0, takes_updates: bool = True
    ) -> WeightTable:
        """The table of a weight with masters of this dtype; of a format of two, that of the `half`
        for forward passes (0) or backward passes (1).
        """
        external, fmt = weight.state.external_scaling_state, weight.format.halves[half]
        key = TableKey(self._backend, fmt, weight.dtype, master, external, half > 0, takes_updates)
        if key not in self:
            self[key] = WeightTable(key, self._device)
        return self[key]

    def of_halves(
        self, weight: QuantizedWeight, master: torch.dtype = torch.float32, takes_updates: bool = True
    ) -> list[WeightTable]:
        """The tables of each format of a weight."""
        return [self.of(weight, master, half, takes_updates) for half in range(len(weight.format.halves))]

    def freeze(self) -> list[WeightTable]:
        """All tables, ready for their stages."""
        return [table.freeze() for table in self.values()]
