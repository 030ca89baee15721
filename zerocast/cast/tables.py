"""WeightTable: the addresses of many weights and their masters, and the stages of a cast over all
of them.

Weights of one format and dtype are the rows of one table. A row has the addresses of a weight and
its master, as offsets into a few storages (StorageTable), and the span of elements that this rank
owns. Each stage is one call for any number of weights.
"""

import bisect
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from zerocast.backends import checks, ops
from zerocast.backends.descriptor import BUFFER_COLUMNS, WIDTH, Column, Piece, check_rows
from zerocast.backends.extension import nbytes
from zerocast.cast.adam_update import AdamInputs, AdamUpdate, MomentGroups
from zerocast.cast.partition import MasterShard
from zerocast.formats import AmaxPolicy, Block, Columnwise, FormatSpec, ScaleRule, get_format
from zerocast.formats.layout import (
    Span,
    amax_counts,
    byte_range,
    moment_group,
    moment_groups,
    split_by_matrix,
    stored_matrices,
    whole_block_rows,
)
from zerocast.formats.memory import check_storage
from zerocast.weight import QuantizedWeight

# A format without amaxes is measured as this one in an optimizer step, for the flags of masters
# that are not finite. Its amax is not read.
MEASURED_AS = get_format("fp8_current")


class StorageSnapshot:
    """The memory of tensors when this was made, which shows later whether one was given different
    memory (`.data =`), or its storage a different size (`untyped_storage().resize_`).

    Args:
        tensors: tensors that users and hosts may replace the data of, by data of any dtype and
            size.
        buffers: tensors whose dtype and size stay the same, such as the buffers of a weight. Only
            their addresses and the sizes of their storages are compared, since every cast pays for
            each comparison.
    """

    def __init__(self, tensors: Iterable[Tensor], buffers: Iterable[Tensor] = ()) -> None:
        self._tensors = list(tensors)
        self._buffers = list(buffers)
        storages = (tensor.untyped_storage() for tensor in (*self._tensors, *self._buffers))
        by_address = {storage._cdata: storage for storage in storages}
        self._storages = list(by_address.values())
        self._noted = self._look()

    @staticmethod
    def joined(snapshots: Iterable["StorageSnapshot"]) -> "StorageSnapshot":
        """Return one snapshot of the tensors of several."""
        parts = list(snapshots)
        tensors = itertools.chain.from_iterable(part._tensors for part in parts)
        return StorageSnapshot(tensors, itertools.chain.from_iterable(part._buffers for part in parts))

    def has_moved(self) -> bool:
        """Return True if the memory of any tensor differs from when this was made."""
        return self._look() != self._noted

    def _look(self) -> list[object]:
        """Return lists made without a Python loop, since this runs in every cast."""
        tensors = self._tensors
        addresses = [*map(Tensor.data_ptr, tensors), *map(Tensor.data_ptr, self._buffers)]
        storage_sizes = list(map(UntypedStorage.nbytes, self._storages))
        return [addresses, storage_sizes, list(map(nbytes, tensors)), list(map(_dtype, tensors))]


_dtype: Callable[[Tensor], torch.dtype] = operator.attrgetter("dtype")


class StorageTable:
    """The storages behind the tensors of one role, such as all masters. A stage gets them as a list
    of flat tensors.

    Attributes:
        dtype: the dtype of the role, uint8 for data of any kind.
        tensors: one for each storage, over all of it.
        followed: the tensors whose addresses show that something moved. These are the first one of
            each storage, and those that `add` was asked to follow.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.tensors: list[Tensor] = []
        self.followed: list[Tensor] = []
        self._index: dict[tuple[int, int], int] = {}

    def add(self, tensor: Tensor, follow: bool = False) -> tuple[int, int]:
        """Return (base index, offset in elements of `dtype`) of a contiguous tensor."""
        storage = tensor.untyped_storage()
        # Storages at one address may differ in size, where a framework made them over its own
        # memory.
        key = storage.data_ptr(), storage.nbytes()
        is_new = key not in self._index
        if is_new:
            self._index[key] = len(self.tensors)
            flat = torch.empty(0, dtype=self.dtype, device=tensor.device)
            self.tensors.append(flat.set_(storage, 0, (storage.nbytes() // self.dtype.itemsize,), (1,)))
        if is_new or follow:
            self.followed.append(tensor)
        return self._index[key], tensor.storage_offset() * tensor.element_size() // self.dtype.itemsize

    def add_base(self, tensor: Tensor) -> tuple[int, int]:
        """Return (base index, 0) of a flat tensor that becomes a base itself, in place of its full
        storage. Parallel lists, such as gradients, then have bases of the same size.
        """
        check_storage("a master", tensor)
        self.tensors.append(tensor)
        self.followed.append(tensor)
        return len(self.tensors) - 1, 0


@dataclass(frozen=True)
class TableKey:
    """The properties that all weights of a table share.

    Attributes:
        backend: a name from `zerocast.backends`.
        fmt: the format.
        nominal: the dtype that the weights compute in.
        master: the dtype of the masters.
        external_scaling_state: True if a host keeps scales and amax histories.
        takes_updates: True if an AdamUpdate steps the masters; else they were stepped before they
            are measured.
    """

    backend: str
    fmt: FormatSpec
    nominal: torch.dtype
    master: torch.dtype = torch.float32
    external_scaling_state: bool = False
    takes_updates: bool = True


class WeightTable:
    """Weights with the same TableKey, one in a row. Add weights, then `freeze`, then call stages.

    Attributes:
        key: the properties that they have in common.
        masters: the storages of their masters.
        buffers: the storages of their buffers, keyed by the name of the buffer.
        table: i64 `[rows, WIDTH]` on the device, from `freeze` on.
        snapshot: the memory of the weights and masters when the table was frozen.
        end: the least number of elements that the tensors of an AdamUpdate must have.
        group_count: the least number of rows that its scalars must have.
    """

    table: Tensor
    snapshot: StorageSnapshot
    end: int
    group_count: int

    def __init__(self, key: TableKey, device: torch.device, of_whole_weights: bool = False) -> None:
        self.key = key
        self.device = device
        # True if stages read all codes of a weight, not only the codes of its owned elements.
        self._of_whole_weights = of_whole_weights
        self._rows: list[list[int]] = []
        # The parameter group of each row.
        self._groups: list[int] = []
        # The pieces of an update with moments in 8 bits, and the pieces of the rows, for the life
        # of the table. None before the first such update.
        self._pieces_of: tuple[Sequence[list[int]], Tensor] | None = None
        self._has_amaxes = key.fmt.amax_policy is not AmaxPolicy.NONE
        self._casts_in_one_pass = key.fmt.casts_in_one_pass
        dtypes = {name: torch.float32 for name in ("amax", "scale", "amax_history")}
        dtypes |= {name: key.fmt.scale_dtype for name in ("rowwise_scale_inv", "columnwise_scale_inv")}
        dtypes |= {name: torch.uint8 for name in ("rowwise_data", "columnwise_data")}
        self.buffers = {name: StorageTable(dtype) for name, dtype in dtypes.items()}
        self.masters = StorageTable(key.master)

    # -- rows

    def add_row(self, shape: Block, amax_offsets: Sequence[int], group: int = 0, shared: int = -1) -> list[int]:
        """Append a row without addresses for a matrix. Return the row, to be filled in.

        Args:
            shape: the rows and columns of the matrix.
            amax_offsets: the offsets in the packed amaxes of its rowwise amaxes, and of its
                columnwise amaxes if it has a separate columnwise grid.
            group: the parameter group.
            shared: the offset in the packed amaxes of the amax that the weight shares with others.
                -1 for none.
        """
        row = [-1] * WIDTH
        row[Column.ROWS], row[Column.COLUMNS] = shape
        row[Column.START] = row[Column.NUMEL] = 0
        row[Column.ROW_AMAX], row[Column.COLUMN_AMAX] = amax_offsets[0], amax_offsets[-1]
        if self.key.fmt.scale_rule is ScaleRule.TWO_LEVEL:
            row[Column.SHARED_AMAX] = shared
        self._rows.append(row)
        self._groups.append(group)
        return row

    def add(
        self, weight: QuantizedWeight, amax_offsets: Sequence[int] = (0, 0), group: int = 0, shared: int = -1
    ) -> list[int]:
        """Append a weight that is stored as one matrix, of which this rank owns nothing. Return its
        row, for `set_span`.
        """
        row = self.add_row(weight.matrix_shape, amax_offsets, group, shared)
        for name, (base, offset) in BUFFER_COLUMNS.items():
            tensor = weight.state.buffers[name]
            # A tensor without elements represents codes that are not kept.
            if tensor is not None and tensor.numel():
                row[base], row[offset] = self.buffers[name].add(tensor)
        return row

    def add_shard(
        self, shard: MasterShard, amax_offsets: Sequence[int], group: int = 0, shared: int = -1, flag: int = -1
    ) -> None:
        """Append a weight with the elements of it that this rank owns, a row for each matrix that
        it is stored in. `flag` is the offset of the number that becomes 1 if its master is not
        finite.
        """
        matrices = shard.matrices()
        for number, matrix in enumerate(matrices):
            of_matrix = amax_offsets_of_matrix(shard.weight.format, shard.weight.shape, amax_offsets, number)
            row = self.add(matrix.weight, of_matrix, group, shared)
            row[Column.NOT_FINITE] = flag
            if matrix.master is not None:
                self.set_span(row, matrix, matrix.span, matrix.master)
            if matrix.cuts is not None:
                self._narrow(row, matrix)

    def add_master(
        self,
        master: Tensor,
        shape: Sequence[int],
        span: Span,
        amax_offsets: Sequence[int],
        group: int,
        flag: int,
        codes: Tensor | None = None,
    ) -> None:
        """Append a flat master of the elements `span` of a weight of `shape`, with its own base,
        for `adam_each`. A pass that casts needs its own `codes`, u8. For FusedAdamW, like
        `add_span`. Plans call `add_shard`.
        """
        at = self.masters.add_base(master)
        stored = None if codes is None else self.buffers["rowwise_data"].add(codes)
        self.add_span(shape, span, amax_offsets, flag, *at, group, stored)

    def add_span(
        self,
        shape: Sequence[int],
        span: Span,
        amax_offsets: Sequence[int],
        flag: int,
        base: int,
        offset: int,
        group: int = 0,
        stored: tuple[int, int] | None = None,
    ) -> None:
        """Append the elements `span` of a weight of `shape`, whose masters are at `offset` of a
        base, and whose codes are at `stored`, a base and an offset.
        """
        fmt, nominal = self.key.fmt, self.key.nominal
        _, matrix = stored_matrices(fmt, shape)
        first, _ = byte_range(fmt, shape, span, nominal)
        for number, own, before in split_by_matrix(fmt, shape, span):
            row = self.add_row(matrix, amax_offsets_of_matrix(fmt, shape, amax_offsets, number), group)
            row[Column.NOT_FINITE] = flag
            row[Column.START], row[Column.NUMEL] = own.start, own.numel
            row[Column.MASTER_BASE], row[Column.MASTER_OFFSET] = base, offset + before
            if stored is not None:
                begin = number * math.prod(matrix)
                origin, _ = byte_range(fmt, shape, Span(begin, begin), nominal)
                row[Column.ROW_DATA_BASE], row[Column.ROW_DATA_OFFSET] = stored[0], stored[1] + origin - first

    def set_span(self, row: list[int], shard: MasterShard, span: Span, master: Tensor) -> None:
        """Fill in the columns of an owned span, and of separate shard storage, whose first byte
        holds the shard's first element.
        """
        row[Column.START], row[Column.NUMEL] = span.start, span.numel
        row[Column.MASTER_BASE], row[Column.MASTER_OFFSET] = self.add_to_masters(master)
        first, _ = byte_range(self.key.fmt, shard.weight.shape, shard.span, shard.weight.dtype)
        for name, tensor in zip(("rowwise_data", "columnwise_data"), shard.stored, strict=False):
            base, offset = BUFFER_COLUMNS[name]
            row[base], row[offset] = self.buffers[name].add(tensor)
            row[offset] -= first

    def add_to_masters(self, master: Tensor) -> tuple[int, int]:
        """Return (base index, offset) of a master. A view stays where its base is. Other tensors
        are followed, since each may be given different storage (`.data =`), even if they share one
        now.
        """
        return self.masters.add(master, follow=not master._is_view())

    def _narrow(self, row: list[int], shard: MasterShard) -> None:
        """Narrow a row of the table to the rows of its weight that this rank computes scales of, as
        if these were a full weight.
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

    def freeze(self) -> "WeightTable":
        """Make tensors of the rows and prepare the stages. Raises ValueError for a row that reaches
        beyond its storage.
        """
        key, masters = self.key, self.masters.tensors
        buffers = {name: storages.tensors for name, storages in self.buffers.items()}
        check_rows(key.fmt, key.nominal, self._rows, {"the master": masters}, buffers, self._of_whole_weights)
        self.table = torch.tensor(self._rows, dtype=torch.int64).view(-1, WIDTH).to(self.device)
        self._group_rows = torch.tensor(self._groups, dtype=torch.int64).to(self.device)
        owned = [(row, group) for row, group in zip(self._rows, self._groups, strict=True) if row[Column.NUMEL]]
        self.end = max((row[Column.MASTER_OFFSET] + row[Column.NUMEL] for row, _ in owned), default=0)
        self.group_count = 1 + max((group for _, group in owned), default=-1)
        followed = itertools.chain.from_iterable(storages.followed for storages in self.buffers.values())
        self.snapshot = StorageSnapshot(self.masters.followed, followed)
        by_argument = {argument: buffers[name] for argument, name in checks.BUFFER_ARGUMENTS.items()}
        checks.remember_checked(self.table, {"masters": masters, **by_argument})
        self._bind_stages()
        return self

    def has_same_memory(self, other: "WeightTable") -> bool:
        """Return True if both tables describe the same weights in the same memory."""
        return self._memory() == other._memory()

    def _memory(self) -> tuple[object, ...]:
        bases = [[tensor.data_ptr() for tensor in storages.tensors] for storages in self._storages()]
        return self.key, self._rows, self._groups, bases

    def _storages(self) -> list[StorageTable]:
        return [self.masters, *self.buffers.values()]

    # -- parts of this table: block rows that only this rank owns, and block rows that are split

    @cached_property
    def split_rows(self) -> "WeightTable | None":
        """The owned elements of the block rows that a boundary between ranks splits, whose codes
        need the reduced amaxes. None if there are none.
        """

        def around_whole_rows(matrix: Block, span: Span) -> Sequence[Span]:
            whole = whole_block_rows(self.key.fmt, matrix, span)
            return Span(span.start, whole.start), Span(whole.stop, span.stop)

        return self._part(around_whole_rows)

    @cached_property
    def _whole_rows(self) -> "WeightTable | None":
        return self._part(lambda matrix, span: [whole_block_rows(self.key.fmt, matrix, span)])

    @cached_property
    def _owned(self) -> "WeightTable | None":
        """The weights that this rank owns elements of, which moments in 8 bits are parallel to."""
        return self._part(lambda matrix, span: [span])

    def _part(self, pieces: Callable[[Block, Span], Sequence[Span]]) -> "WeightTable | None":
        """Return the table of `pieces(shape of a matrix, owned span)` of each weight, in the same
        storages; None without any.
        """
        part = WeightTable(self.key, self.device)
        part.masters = self.masters
        part.buffers = self.buffers
        for row, group in zip(self._rows, self._groups, strict=True):
            span = Span(row[Column.START], row[Column.START] + row[Column.NUMEL])
            for piece in pieces((row[Column.ROWS], row[Column.COLUMNS]), span) if span.numel else ():
                if piece.numel:
                    of_piece = row.copy()
                    of_piece[Column.START], of_piece[Column.NUMEL] = piece.start, piece.numel
                    of_piece[Column.MASTER_OFFSET] += piece.start - span.start
                    part._rows.append(of_piece)
                    part._groups.append(group)
        return part.freeze() if part._rows else None

    # -- stages

    def measure(self, packed: Tensor, update: AdamUpdate | None = None, skip: Tensor | None = None) -> None:
        """Measure the blocks that this rank owns elements of, after an `update` of the masters if
        there is one. `cast_rest` with the same update writes the remaining codes and moments.

        Where scales are local (`FormatSpec.casts_in_one_pass`) an update writes the codes in the
        same pass, except of the block rows that a boundary splits.
        """
        if not self.masters.tensors:
            return
        if update is None or not self.key.takes_updates:
            if self._has_amaxes or update is not None:
                self._partial_amax(packed=packed)
            return
        self.adam_each(update.inputs, packed, skip, casts=self._casts_in_one_pass)

    def compute_scales(self, packed: Tensor, skip: Tensor | None) -> None:
        """Compute scale buffers and tensor amaxes, the same on every rank."""
        if self.key.fmt.scale_rule is not ScaleRule.NONE:
            self._compute_scales(packed=packed, skip=skip)

    def cast_rest(self, packed: Tensor, update: AdamUpdate | None, skip: Tensor | None) -> None:
        """Write the codes that `measure` did not write, with scales from the reduced amaxes, and
        round the moments of cut groups (`CutGroups`).
        """
        casts = False
        if update is not None and self.key.takes_updates:
            casts = self._casts_in_one_pass
            if update.groups is not None:
                self.finish_moments(update.inputs, packed, skip)
        rest = self.split_rows if casts else self
        if rest and rest.masters.tensors:
            rest._partial_cast(packed=packed, skip=skip)

    def partial_cast(self, packed: Tensor, skip: Tensor | None) -> None:
        """Write the codes of the owned elements."""
        if self.masters.tensors:
            self._partial_cast(packed=packed, skip=skip)

    def roll_history(self, skip: Tensor | None) -> None:
        """Delayed scaling: compute the scale of the next cast, unless a host keeps the history."""
        if self.key.fmt.amax_policy is AmaxPolicy.DELAYED and not self.key.external_scaling_state:
            self._roll_history(skip=skip)

    def transpose(self) -> None:
        """Make the columnwise copies from the rowwise bytes."""
        self._transpose()

    def adam_each(self, inputs: AdamInputs, packed: Tensor, skip: Tensor | None = None, casts: bool = False) -> None:
        """Take a step of Adam, with a gradient and moments for each base of the masters, of its
        size. Write the amaxes of the new masters into `packed`.

        With `casts` the same pass writes the codes of the block rows that this rank owns
        completely, for a format with `FormatSpec.casts_in_one_pass`; the codes of `split_rows` need
        the reduced amaxes. With moments in 8 bits (`inputs.groups`) call `finish_moments`
        afterwards.
        """
        state, groups = _arguments_of(inputs, packed, skip), inputs.groups
        if not casts and groups is None:
            self._adam_amax(**state)
            return
        whole_rows, others = (self._whole_rows, self.split_rows) if casts else (None, self._owned)
        if groups is None:
            if whole_rows:
                whole_rows._adam_cast(**state)
            if others:
                others._adam_amax(**state)
            return
        if whole_rows:
            whole_rows._adam_8bit_cast(**state, **whole_rows._of_groups(groups))
        if others:
            others._adam_8bit(**state, **others._of_groups(groups), cut_largest=groups.cut_largest, finishes=False)

    def finish_moments(self, inputs: AdamInputs, packed: Tensor, skip: Tensor | None = None) -> None:
        """Round the moments of cut groups, once their largest values were reduced. The arguments
        are as in `adam_each`.
        """
        state, groups = _arguments_of(inputs, packed, skip), inputs.groups
        if groups is not None and self._owned and groups.cut_largest.numel():
            of_groups = self._owned._of_groups(groups)
            self._owned._adam_8bit(**state, **of_groups, cut_largest=groups.cut_largest, finishes=True)

    def _of_groups(self, groups: MomentGroups) -> dict[str, Any]:
        """Return the arguments of a stage that describe groups of moments."""
        return {"moment_scales": groups.scales, "pieces": self._moment_pieces(groups), "steps": groups.steps}

    def _moment_pieces(self, groups: MomentGroups) -> Tensor:
        """Return the pieces of the rows, made by the first step."""
        if self._pieces_of is None or self._pieces_of[0] is not groups.pieces:
            in_order = sorted(groups.pieces, key=_place)
            rows = [_piece_of(in_order, row) for row in self._rows]
            pieces = torch.tensor(rows, dtype=torch.int64).to(self.device)
            bases = {"masters": self.masters.tensors, "tables": [self.table]}
            checks.remember_checked(pieces, {**bases, "row_data": self.buffers["rowwise_data"].tensors})
            self._pieces_of = groups.pieces, pieces
        return self._pieces_of[1]

    def _bind_stages(self) -> None:
        measured_as = self.key.fmt if self._has_amaxes else MEASURED_AS
        self._partial_amax = self._bind(ops.partial_amax, measured_as)
        self._adam_amax = self._bind(ops.adam_amax, measured_as)
        self._adam_8bit = self._bind(ops.adam_8bit, measured_as)
        self._adam_cast = self._bind(ops.adam_cast, self.key.fmt)
        self._adam_8bit_cast = self._bind(ops.adam_8bit_cast, self.key.fmt)
        self._compute_scales = self._bind(ops.compute_scales, self.key.fmt)
        self._partial_cast = self._bind(ops.partial_cast, self.key.fmt)
        self._roll_history = self._bind(ops.roll_history, self.key.fmt)
        self._transpose = self._bind(ops.transpose, self.key.fmt)

    def _bind(self, stage: ops.Stage, fmt: FormatSpec) -> Callable[..., None]:
        """Return the stage with all that is the same in every cast."""
        known: dict[str, Any] = {
            "nominal": self.key.nominal,
            "masters": self.masters.tensors,
            "table": self.table,
            "groups": self._group_rows,
        }
        known |= {argument: self.buffers[name].tensors for argument, name in checks.BUFFER_ARGUMENTS.items()}
        taken = {name: known[name] for name in stage.arguments if name in known}
        return stage.bind(self.key.backend, str(fmt), **taken)


def _arguments_of(inputs: AdamInputs, packed: Tensor, skip: Tensor | None) -> dict[str, Any]:
    """Return the arguments that all stages of Adam have."""
    arguments = {**inputs._asdict(), "packed": packed, "skip": skip}
    del arguments["groups"]
    return arguments


def amax_offsets_of_matrix(
    fmt: FormatSpec, shape: Sequence[int], amax_offsets: Sequence[int], number: int
) -> tuple[int, int]:
    """Return the offsets of the rowwise and columnwise amaxes of matrix `number` of a weight of
    `shape` whose amaxes begin at `amax_offsets`.
    """
    _, matrix = stored_matrices(fmt, shape)
    rowwise, columnwise = amax_counts(fmt, *matrix)
    return amax_offsets[0] + number * rowwise, amax_offsets[-1] + number * columnwise


_place = operator.itemgetter(Piece.BASE, Piece.OFFSET)


def _piece_of(pieces: Sequence[list[int]], row: Sequence[int]) -> list[int]:
    """Return the piece that describes the moments of a `row` of a table. If the row is only one of
    the matrices of a weight, or some of its block rows, that is the part of a piece for these
    elements; it begins with the first element of a group of moments.

    `pieces` are sorted by base and offset.
    """
    place = row[Column.MASTER_BASE], row[Column.MASTER_OFFSET]
    index = bisect.bisect_right(pieces, place, key=_place) - 1
    piece = pieces[index].copy()
    before = row[Column.MASTER_OFFSET] - piece[Piece.OFFSET]
    after = piece[Piece.NUMEL] - before - row[Column.NUMEL]
    if not before and not after:
        return piece
    start, columns = piece[Piece.START], piece[Piece.COLUMNS]
    groups_before = moment_group(start + before, columns) - moment_group(start, columns)
    piece[Piece.SCALE] += groups_before
    piece[Piece.SECOND_SCALE] += groups_before
    piece[Piece.OFFSET] += before
    piece[Piece.START] += before
    piece[Piece.NUMEL] = row[Column.NUMEL]
    cut_first = piece[Piece.CUT_FIRST] if not before else -1
    cut_last = piece[Piece.CUT_LAST] if not after else -1
    if moment_groups(piece[Piece.START], piece[Piece.NUMEL], columns) == 1:
        cut_first = cut_last = max(cut_first, cut_last)
    piece[Piece.CUT_FIRST], piece[Piece.CUT_LAST] = cut_first, cut_last
    return piece


class WeightTables(dict[TableKey, WeightTable]):
    """Tables by key, each made by `make` when its first weight arrives."""

    def __init__(
        self,
        device: torch.device,
        backend: str,
        make: "Callable[[TableKey, torch.device], WeightTable]" = WeightTable,
    ) -> None:
        super().__init__()
        self._device = device
        self._backend = backend
        self._make = make

    def of(
        self, weight: QuantizedWeight, master: torch.dtype = torch.float32, takes_updates: bool = True
    ) -> WeightTable:
        """Return the table of a weight with masters of this dtype."""
        external = weight.state.external_scaling_state
        key = TableKey(self._backend, weight.format, weight.dtype, master, external, takes_updates)
        if key not in self:
            self[key] = self._make(key, self._device)
        return self[key]

    def freeze(self) -> list[WeightTable]:
        """Freeze all tables and return them."""
        return [table.freeze() for table in self.values()]
