"""The rows of a weight that each rank holds under FSDP2, and the bytes that it sends of them.

`zerocast/fsdp2/gather_layout.py` describes the complete message. Layouts depend on shapes, formats
and ranks only, and are computed without importing torch, which `zerocast plan` does not wait for.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerocast.formats import AmaxPolicy, Block, Columnwise, FormatSpec
from zerocast.formats.element import ITEMSIZE, torch_dtype
from zerocast.formats.layout import (
    OPERAND_ALIGNMENT_BYTES,
    Buffer,
    Span,
    amax_grid,
    buffers,
    round_up,
    rowwise_data,
    weight_amax_counts,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# The bytes of a header: two int32, padded so that scalars and scales after it are aligned.
HEADER = OPERAND_ALIGNMENT_BYTES
# Rows of scales that are multiples of this number of bytes are copied by one index_select of int64.
UNIT = 8
CODES = "rowwise_data", "columnwise_data"
SCALES = "rowwise_scale_inv", "columnwise_scale_inv"
# A rank keeps up to this number of bytes of codes between gathers unless `keep_codes` is given. For
# so few the launches of casts for each gather cost more than the memory is worth.
MAX_KEPT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class RowShards:
    """`rows` of a matrix over `world` ranks, `chunk` of them each."""

    rows: int
    chunk: int
    world: int

    def span(self, rank: int) -> Span:
        """Return the rows of a rank."""
        return Span(min(rank * self.chunk, self.rows), min((rank + 1) * self.chunk, self.rows))

    def touched(self, rank: int, height: int) -> Span:
        """Return the block rows that a rank holds any row of."""
        span = self.span(rank)
        return Span(span.start // height, -(-span.stop // height)) if span.numel else Span(0, 0)

    def owned(self, rank: int, height: int) -> Span:
        """Return the block rows whose first row a rank holds: every block row has one owner."""
        span = self.span(rank)
        return Span(-(-span.start // height), -(-span.stop // height))

    def cut(self, height: int) -> tuple[int, ...]:
        """Return the block rows that more than one rank holds rows of, in order."""
        return _cut(self.rows, self.chunk, height)

    def owners(self, height: int) -> tuple[list[int], list[int]]:
        """Return (rank, index among the rank's own) of every block row."""
        blocks = range(-(-self.rows // height))
        ranks = [block * height // self.chunk for block in blocks]
        return ranks, [block - self.owned(rank, height).start for block, rank in zip(blocks, ranks, strict=True)]


@dataclass(frozen=True)
class InnerShards:
    """The equal inner shards of a weight of `shape` over `world` ranks, along dimension `dim`."""

    shape: tuple[int, ...]
    dim: int
    world: int

    @property
    def cuts_columns(self) -> bool:
        """True if an inner shard has some columns of all rows, else some rows of each leading
        index.
        """
        return self.dim == len(self.shape) - 1

    @property
    def runs(self) -> int:
        """The number of runs of elements of the weight that an inner shard consists of."""
        return math.prod(self.shape[: self.dim])

    def copy_of_elements(self, buffer: "Tensor", gathered: "Tensor") -> "tuple[Tensor, Tensor]":
        """Return (target, source) whose copy fills `buffer`, the codes or masters of the weight,
        with the elements of all inner shards, `gathered`.
        """
        byte, word = torch_dtype("uint8"), torch_dtype("int64")
        target = buffer.view(byte).view(self.runs, self.world, -1).transpose(0, 1)
        source = gathered.view(byte).view(target.shape)
        if target.shape[2] % UNIT == 0:
            return target.view(word), source.view(word)
        return target, source

    def copy_of_scales(self, used: "Tensor", sent: "Tensor") -> "tuple[Tensor, Tensor]":
        """Return (target, source) whose copy fills the scales `used` of the weight, `[block rows,
        height, block_columns, width]`, with the codes of all inner shards, `sent`, `[world, block
        rows, block_columns]`.
        """
        if self.cuts_columns:
            target = used.unflatten(2, (self.world, -1)).movedim(2, 0)
        else:
            target = used.unflatten(0, (self.runs, self.world, -1)).transpose(0, 1)
            sent = sent.unflatten(1, (self.runs, -1))
        return target, sent.unsqueeze(-2).unsqueeze(-1).expand_as(target)


@functools.lru_cache(maxsize=1024)  # the weights of a model repeat a few shapes
def _cut(rows: int, chunk: int, height: int) -> tuple[int, ...]:
    return tuple(sorted({row // height for row in range(chunk, rows, chunk) if row % height}))


@dataclass(frozen=True)
class AmaxGrid:
    """The amaxes of a small weight in one direction, by rows of exchange blocks.

    Attributes:
        height: the rows of elements in a row of exchange blocks.
        row_numel: the amaxes in a row of exchange blocks.
        span: the amaxes of the grid, among all amaxes of the small weight.
    """

    height: int
    row_numel: int
    span: Span

    def row(self, index: int) -> Span:
        """Return the amaxes of one row of exchange blocks. The last row may have fewer than
        others.
        """
        start = self.span.start + index * self.row_numel
        return Span(start, min(start + self.row_numel, self.span.stop))


@dataclass(frozen=True)
class ShardGeometry:
    """The part of a weight of `columns` columns that `rank` casts, as a separate small weight.
    Equal shards compare equal.

    The small weight has the block rows that the shard touches, so that the stages need to know
    nothing of FSDP2.
    """

    format: FormatSpec
    nominal_name: str
    shards: RowShards
    columns: int
    rank: int
    # The rows of each of the matrices that the weight is stored in, if these are several
    # (docs/formats/experts.md). Shards then consist of whole matrices.
    matrix_rows: int | None = None
    # The inner shards of a weight that is sharded along a dimension other than the first. All else
    # describes the inner shard of this rank, as a weight over one rank.
    inner_shards: InnerShards | None = None

    @functools.cached_property
    def nominal(self) -> "torch.dtype":
        """The nominal dtype of the weight, as torch has it."""
        return torch_dtype(self.nominal_name)

    @property
    def rows(self) -> int:
        """Rows of the full weight, or of an inner shard."""
        return self.shards.rows

    @property
    def world(self) -> int:
        """The number of ranks that send a part of the weight."""
        return self.shards.world if self.inner_shards is None else self.inner_shards.world

    @property
    def gathered_shape(self) -> tuple[int, ...]:
        """The shape of the weight that is gathered."""
        return self.shape(self.rows) if self.inner_shards is None else self.inner_shards.shape

    @functools.cached_property
    def scale_shards(self) -> RowShards:
        """The shards in rows by which block rows are counted. The last block row of each of several
        matrices counts as a full one.
        """
        if self.matrix_rows is None:
            return self.shards
        padded = round_up(self.matrix_rows, self._height)
        rows, chunk = (extent // self.matrix_rows * padded for extent in (self.rows, self.shards.chunk))
        return RowShards(rows, chunk, self.shards.world)

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of the given number of rows of the weight, with one more dimension where
        they are several matrices.
        """
        if self.matrix_rows is None:
            return rows, self.columns
        return rows // self.matrix_rows, self.matrix_rows, self.columns

    @property
    def has_tensor_amax(self) -> bool:
        """True if an amax of the full tensor is reduced."""
        return self.format.has_tensor_amax or self.format.amax_policy is AmaxPolicy.DELAYED

    @functools.cached_property
    def first_row(self) -> int:
        """The row of the weight that the small weight begins with."""
        return self._touched.start * self._height if self.matrix_rows is None else self.shards.span(self.rank).start

    @functools.cached_property
    def cast_rows(self) -> int:
        """Rows of the small weight."""
        if self.matrix_rows is not None:
            return self.shards.span(self.rank).numel
        touched = self._touched
        rows = min(self.rows, touched.stop * self._height) - self.first_row if touched.numel else 0
        # A scale of the whole tensor is computed on every rank, also on one without rows.
        return rows if self._blocks else max(1, rows)

    @property
    def takes_part(self) -> bool:
        """True if this rank has anything to compute. With scales of blocks only, it does if it has
        rows.
        """
        return self.cast_rows > 0

    @functools.cached_property
    def span(self) -> Span:
        """The elements of the small weight that this rank holds."""
        rows = self.shards.span(self.rank)
        start = (rows.start - self.first_row) * self.columns
        return Span(start, start + rows.numel * self.columns) if rows.numel else Span(0, 0)

    @property
    def span_in_weight(self) -> Span:
        """The elements of the full weight, or of an inner shard, that this rank holds."""
        rows = self.shards.span(self.rank)
        return Span(rows.start * self.columns, rows.stop * self.columns)

    @property
    def amax_counts(self) -> tuple[int, int]:
        """Number of amaxes in the rowwise grid and in an own columnwise grid of the small
        weight.
        """
        return weight_amax_counts(self.format, self.shape(self.cast_rows)) if self.takes_part else (0, 0)

    def amax_grids(self) -> list[AmaxGrid]:
        """Return the rowwise grid of amaxes and the own columnwise grid, as far as the format has
        them.
        """
        grids, fmt = [], self.format
        rowwise, columnwise = self.amax_counts
        if fmt.block and fmt.exchange_block:
            height = fmt.exchange_block[0]
            block_columns = amax_grid(fmt.block, self.rows, self.columns)[1]
            grids.append(AmaxGrid(height, height // fmt.block[0] * block_columns, Span(0, rowwise)))
        if fmt.columnwise_block:
            span = Span(rowwise, rowwise + columnwise)
            grids.append(AmaxGrid(fmt.columnwise_block[0], self.columns, span))
        return grids

    @property
    def _blocks(self) -> list[int]:
        return [block[0] for block in (self.format.exchange_block, self.format.columnwise_block) if block]

    @property
    def _height(self) -> int:
        return max(self._blocks, default=1)

    @functools.cached_property
    def _touched(self) -> Span:
        return self.shards.touched(self.rank, self._height)


@dataclass(frozen=True)
class ScaleRegion:
    """The scales of one direction in the metadata: `count` block rows of `block_columns` entries
    from byte `offset` on.

    `name` is the name of the weight's buffer, of which each scale fills `repeat` rows and columns,
    and `dtype` is the name of its dtype.
    """

    name: str
    height: int
    block_columns: int
    dtype: str
    repeat: Block
    offset: int
    count: int

    def view(self, metadata: "Tensor") -> "Tensor":
        """Return the scales `[..., count, block_columns]` in metadata `[..., bytes]`."""
        nbytes = self.count * self.block_columns * ITEMSIZE[self.dtype]
        entries = metadata[..., self.offset : self.offset + nbytes].view(torch_dtype(self.dtype))
        return entries.view(*metadata.shape[:-1], self.count, self.block_columns)


@dataclass(frozen=True)
class RowsOfScales:
    """The rows of the scale buffer `name` of the weight at `weight_index`, as copies of rows of
    metadata: each block row fills `height` rows of `row_bytes` bytes.

    `owners` are (rank, index among the rank's own) of each block row; the block rows of a rank
    follow each other from byte `offset` of all its metadata on.
    """

    weight_index: int
    name: str
    dtype: "torch.dtype"
    row_bytes: int
    height: int
    offset: int
    owners: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def rows(self) -> int:
        """The rows of the buffer."""
        return len(self.owners[0]) * self.height


class WeightLayout:
    """The bytes that a rank sends of one weight: its codes, by direction, and its metadata.

    Attributes:
        directions: the number of sets of codes that are sent, 1 or 2.
        code_spans: (start, stop) of each set, of a full shard, in the bytes of codes.
        codes_nbytes: the bytes of all sets, each rounded up to the alignment of operands.
        metadata_bytes: the size of the metadata.
        scalar_offsets: the offsets in it of the scalars of the tensor, keyed by the names of their
            buffers.
        scales: the scales in it, one region for each scale buffer of a gathered weight.
    """

    def __init__(self, geometry: ShardGeometry) -> None:
        self.geometry = geometry
        fmt = geometry.format
        self.directions = 2 if fmt.casts_columnwise else 1
        row = rowwise_data(fmt, 1, geometry.columns, geometry.nominal_name)
        self._code_dtype = row.dtype_name
        self._row_bytes = row.nbytes
        code_bytes = geometry.shards.chunk * self._row_bytes
        slot = round_up(code_bytes, OPERAND_ALIGNMENT_BYTES)
        self.code_spans = [(index * slot, index * slot + code_bytes) for index in range(self.directions)]
        self.codes_nbytes = self.directions * slot
        self.metadata_bytes = HEADER
        self.scalar_offsets = {"amax": self._reserve(4)} if fmt.has_tensor_amax else {}
        if fmt.has_tensor_scale:
            self.scalar_offsets[SCALES[0]] = self._reserve(4)
        self.scales: list[ScaleRegion] = []
        self._add_scales(SCALES[0], fmt.block)
        self._add_scales(SCALES[1], fmt.columnwise_block)
        self._sent = list(self.scales)
        # With shared scales, those that are sent fill both buffers.
        if fmt.columnwise is Columnwise.SHARED:
            repeat = fmt.scale_repeat(columnwise=True)
            self.scales.append(replace(self.scales[0], name=SCALES[1], repeat=repeat))

    @property
    def nbytes(self) -> int:
        """All bytes that a rank sends."""
        return self.codes_nbytes + self.metadata_bytes

    def _reserve(self, nbytes: int) -> int:
        """Return the offset of a new region of the metadata."""
        offset = self.metadata_bytes
        self.metadata_bytes += round_up(nbytes, OPERAND_ALIGNMENT_BYTES)
        return offset

    def _add_scales(self, name: str, block: Block | None) -> None:
        """Reserve room for the scales of `block`, one of the format's."""
        if block is None:
            return
        fmt, shards = self.geometry.format, self.geometry.scale_shards
        block_columns = amax_grid(block, shards.rows, self.geometry.columns)[1]
        # Rank 0 owns the most block rows, since its shard begins with one.
        count = shards.owned(0, block[0]).numel
        offset = self._reserve(count * block_columns * ITEMSIZE[fmt.scale_dtype_name])
        repeat = fmt.scale_repeat(columnwise=block is fmt.columnwise_block)
        self.scales.append(ScaleRegion(name, block[0], block_columns, fmt.scale_dtype_name, repeat, offset, count))

    def codes_in(self, buffer: "Tensor") -> "list[Tensor]":
        """Return the codes by direction at the beginning of buffers `[..., bytes]`."""
        return [buffer[..., start:stop] for start, stop in self.code_spans]

    def gathered_codes(self, codes: "Sequence[Tensor]") -> "dict[str, Tensor]":
        """Return the buffers of codes of the gathered weight, keyed by name. `codes` are the codes
        of all ranks in order, by direction. The codes of inner shards need a copy
        (`GatheredMetadata`).
        """
        if self.geometry.inner_shards is not None:
            return {}
        rows, nbytes = self.geometry.rows, self.geometry.rows * self._row_bytes
        dtype = torch_dtype(self._code_dtype)
        matrices = [flat.view(-1)[:nbytes].view(dtype).view(rows, -1) for flat in codes]
        return dict(zip(CODES, matrices, strict=False))

    def scalars(self, metadata: "Tensor") -> "dict[str, Tensor]":
        """Return the scalars in the metadata `[bytes]`, f32[1], keyed by the names of buffers."""
        dtype = torch_dtype("float32")
        return {name: metadata[offset : offset + 4].view(dtype) for name, offset in self.scalar_offsets.items()}

    def outgoing_scales(self, metadata: "Tensor", scales: "Mapping[str, Tensor]") -> "list[tuple[Tensor, Tensor]]":
        """Return pairs (target in the metadata, source) for the scales of the block rows that this
        rank owns.

        The `metadata`, `[weights, metadata_bytes]`, and the scale buffers `scales`, keyed by name,
        `[weights, ...]`, belong to weights of this layout.
        """
        pairs = []
        for region in self._sent:
            owned = self.geometry.scale_shards.owned(self.geometry.rank, region.height)
            is_one_matrix = self.geometry.matrix_rows is None
            first = owned.start - self.geometry.first_row // region.height if is_one_matrix else 0
            source = scales[region.name][:, :: region.repeat[0], :: region.repeat[1]]
            if owned.numel:
                source = source[:, first : first + owned.numel, : region.block_columns]
                pairs.append((region.view(metadata)[:, : owned.numel], source))
        return pairs

    def code_specs(self) -> list[tuple[str, Buffer]]:
        """Return the name and buffer of each set of codes of the gathered weight."""
        specs = buffers(self.geometry.format, self.geometry.gathered_shape, self.geometry.nominal_name)
        return [(name, spec) for name in CODES[: self.directions] if (spec := specs[name]) is not None]

    def scale_specs(self, shape: tuple[int, ...]) -> list[tuple[ScaleRegion, Buffer]]:
        """Return each region of scales with its buffer in a weight of this `shape`: the gathered
        weight, or the one that this rank casts.
        """
        specs = buffers(self.geometry.format, shape, self.geometry.nominal_name)
        return [(region, spec) for region in self.scales if (spec := specs[region.name]) is not None]

    def scale_rows(self, region: ScaleRegion, spec: Buffer, weight_index: int, first: int) -> RowsOfScales | None:
        """Return the rows by which one indexed copy fills the buffer of a region. None if the
        buffer has padding, a scale fills several columns, or ranks have inner shards.

        The region is of the weight at `weight_index`, whose metadata begins at byte `first` of all.
        """
        if self.geometry.inner_shards is not None:
            return None
        shards = self.geometry.scale_shards
        height, width = region.repeat
        blocks = -(-shards.rows // region.height)
        row_bytes = region.block_columns * spec.itemsize
        if width != 1 or spec.shape != (blocks * height, region.block_columns) or row_bytes % UNIT:
            return None
        ranks, places = shards.owners(region.height)
        owners = tuple(ranks), tuple(places)
        return RowsOfScales(weight_index, region.name, spec.dtype, row_bytes, height, first + region.offset, owners)


@functools.lru_cache(maxsize=1024)  # the weights of a model repeat a few geometries
def weight_layout(geometry: ShardGeometry) -> WeightLayout:
    """Return the layout of the weights of one geometry."""
    return WeightLayout(geometry)
