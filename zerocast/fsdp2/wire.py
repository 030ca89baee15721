"""The wire format of a gather: which rows of a weight a rank holds, the bytes that it sends of the
weights that FSDP2 gathers together, laid out alike on all ranks, and where gathered bytes go.

FSDP2 gives rank r the rows `[r*C, (r+1)*C)` of the first dimension with `C = ceil(M / world)`, less
at the end: a shard may be short or empty, and a boundary may cut a row of blocks. Rows here are
those of the weight as a matrix. A rank sends:

    codes of weight 1 | codes of weight 2 | ... | codes of weight 0 | side channels of 0, 1, 2, ...

The codes of each weight and direction are a separate output of its hook, so that gathered codes are
in the order of the weight and need no copy. All side channels are one output, the last one of the
first weight, since each output costs the host time. A side channel is a header (the status of the
rank and the number of its cast), the scalars of the tensor, and the scales of the block rows that
the rank owns. Padding and replication of scales (docs/formats/common.md) are added after the
gather. In a shard group of one rank FSDP2 takes only the first output of a weight (torch 2.11 to
2.13), so there the codes of both directions are one output, and the side channels follow those of
the first weight.

Codes, scalars and scales begin at multiples of 16 bytes, in the buffer of a rank and in the
gathered bytes. Products read the scalars in place, and cuBLASLt needs operands and their scales
aligned.

A weight may be sharded along another dimension than the first (`Shard(1)` of `shard_placement_fn`).
Each rank then has an *inner shard*, which it casts as a weight by itself, as a rank casts its slice
under tensor parallelism. Gathers bring the inner shards one after another, and codes and scales are
copied to where they belong in the weight.

Layouts depend on shapes, formats and ranks only. If codes are cast at each gather
(`cast_group.py`), a rank keeps side channels between gathers and no codes.
"""

import functools
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zerocast.formats import AmaxPolicy, Block, Columnwise, FormatSpec, ScaleRule
from zerocast.formats.layout import (
    ALLOCATION_ALIGNMENT_BYTES,
    OPERAND_ALIGNMENT_BYTES,
    Buffer,
    Span,
    amax_grid,
    buffers,
    round_up,
    rowwise_data,
    weight_amax_counts,
)
from zerocast.fsdp2 import torch_fsdp

# The bytes of a header: two int32, padded so that scalars and scales after it are aligned.
HEADER = OPERAND_ALIGNMENT_BYTES
# Rows of scales that are multiples of so many bytes are copied by one index_select of int64.
UNIT = 8
CODES = "rowwise_data", "columnwise_data"
SCALES = "rowwise_scale_inv", "columnwise_scale_inv"
# A rank keeps up to so many bytes of codes between gathers unless `keep_codes` is given. For so few
# the launches of casts for each gather cost more than the memory is worth.
MOST_KEPT = 64 * 2**20


@dataclass(frozen=True)
class RowShards:
    """`rows` of a matrix over `world` ranks, `chunk` of them each."""

    rows: int
    chunk: int
    world: int

    def span(self, rank: int) -> Span:
        """The rows of a rank."""
        return Span(min(rank * self.chunk, self.rows), min((rank + 1) * self.chunk, self.rows))

    def touched(self, rank: int, height: int) -> Span:
        """The block rows that a rank holds any row of."""
        span = self.span(rank)
        return Span(span.start // height, -(-span.stop // height)) if span.numel else Span(0, 0)

    def owned(self, rank: int, height: int) -> Span:
        """The block rows whose first row a rank holds: every block row has one owner."""
        span = self.span(rank)
        return Span(-(-span.start // height), -(-span.stop // height))

    def cut(self, height: int) -> tuple[int, ...]:
        """The block rows that more than one rank holds rows of, in order."""
        return _cut(self.rows, self.chunk, height)

    def owners(self, height: int) -> tuple[list[int], list[int]]:
        """(rank, place among the rank's own) of every block row."""
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

    def copy_of_elements(self, buffer: Tensor, gathered: Tensor) -> tuple[Tensor, Tensor]:
        """Return (target, source) whose copy fills `buffer`, the codes or masters of the weight,
        with those of all inner shards, `gathered`.
        """
        target = buffer.view(torch.uint8).view(self.runs, self.world, -1).transpose(0, 1)
        source = gathered.view(torch.uint8).view(target.shape)
        if target.shape[2] % UNIT == 0:
            return target.view(torch.int64), source.view(torch.int64)
        return target, source

    def copy_of_scales(self, used: Tensor, sent: Tensor) -> tuple[Tensor, Tensor]:
        """Return (target, source) whose copy fills the scales `used` of the weight, `[block rows,
        height, across, width]`, with those of all inner shards, `sent`, `[world, block rows,
        across]`.
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
class ShardGeometry:
    """The part of a weight of `columns` columns that `rank` casts, as a separate small weight.
    Equal shards compare equal.

    The small weight has the block rows that the shard touches, so that the stages need to know
    nothing of FSDP2. The stage of two-level scales takes the largest amax of its weight for the
    tensor amax. A ghost block row without elements follows at the end. One of its amaxes is the
    reduced tensor amax, so the stage finds it.
    """

    format: FormatSpec
    nominal: torch.dtype
    shards: RowShards
    columns: int
    rank: int
    # The rows of each of the matrices that the weight is stored in, if these are several
    # (docs/formats/experts.md). Shards then consist of whole matrices.
    matrix_rows: int | None = None
    # The inner shards of a weight that is sharded along another dimension than the first. All else
    # describes the inner shard of this rank, as a weight over one rank.
    inner_shards: InnerShards | None = None

    @property
    def rows(self) -> int:
        """Rows of the whole weight, or of an inner shard."""
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
        matrices counts as a whole one.
        """
        if self.matrix_rows is None:
            return self.shards
        padded = round_up(self.matrix_rows, self._height)
        rows, chunk = (extent // self.matrix_rows * padded for extent in (self.rows, self.shards.chunk))
        return RowShards(rows, chunk, self.shards.world)

    def shape(self, rows: int) -> tuple[int, ...]:
        """The shape of so many rows of the weight, in a dimension more where they are several
        matrices.
        """
        if self.matrix_rows is None:
            return rows, self.columns
        return rows // self.matrix_rows, self.matrix_rows, self.columns

    @property
    def has_ghost(self) -> bool:
        """True if a block row of no elements carries the tensor amax."""
        return self.format.scale_rule is ScaleRule.TWO_LEVEL

    @property
    def has_tensor_amax(self) -> bool:
        """True if an amax of the whole tensor is reduced."""
        return self.format.has_tensor_amax or self.format.amax_policy is AmaxPolicy.DELAYED

    @functools.cached_property
    def first_row(self) -> int:
        """The row of the weight that the small weight begins with."""
        return self._touched.start * self._height if self.matrix_rows is None else self.shards.span(self.rank).start

    @functools.cached_property
    def cast_rows(self) -> int:
        """Rows of the small weight, of the ghost too."""
        if self.matrix_rows is not None:
            return self.shards.span(self.rank).numel
        touched = self._touched
        rows = min(self.rows, touched.stop * self._height) - self.first_row if touched.numel else 0
        if self._blocks:
            return rows + (self._height if self.has_ghost else 0)
        return max(1, rows)

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
        """The elements of the whole weight, or of an inner shard, that this rank holds."""
        rows = self.shards.span(self.rank)
        return Span(rows.start * self.columns, rows.stop * self.columns)

    @property
    def amax_counts(self) -> tuple[int, int]:
        """Number of amaxes in the rowwise grid and in an own columnwise grid of the small
        weight.
        """
        return weight_amax_counts(self.format, self.shape(self.cast_rows)) if self.takes_part else (0, 0)

    def grids(self) -> list[tuple[int, int, int]]:
        """Return (height, amaxes, first amax among those of this weight) of a row of exchange
        blocks, for each grid. The last row of a grid may have fewer amaxes.
        """
        grids, fmt = [], self.format
        if fmt.block and fmt.exchange_block:
            height = fmt.exchange_block[0]
            across = amax_grid(fmt.block, self.rows, self.columns)[1]
            grids.append((height, height // fmt.block[0] * across, 0))
        if fmt.columnwise_block:
            grids.append((fmt.columnwise_block[0], self.columns, self.amax_counts[0]))
        return grids

    @property
    def tensor_amaxes(self) -> list[int]:
        """The amaxes of this weight that take the reduced amax of the tensor: its only one if it
        has one scale, and one in the ghost if it has two-level scales.
        """
        fmt, (count, _) = self.format, self.amax_counts
        if fmt.scale_rule is ScaleRule.TWO_LEVEL:
            return [count - amax_grid(fmt.block, self.rows, self.columns)[1]]
        return [0] if fmt.amax_policy is not AmaxPolicy.NONE and fmt.block is None and count else []

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
    """The scales of one direction in a side channel: `count` block rows of `across` entries from
    byte `offset` on.

    `name` is that of the weight's buffer, of which each scale fills `repeat` rows and columns.
    """

    name: str
    height: int
    across: int
    dtype: torch.dtype
    repeat: Block
    offset: int
    count: int

    def of(self, side: Tensor) -> Tensor:
        """Return the scales `[..., count, across]` in side channels `[..., bytes]`."""
        nbytes = self.count * self.across * self.dtype.itemsize
        entries = side[..., self.offset : self.offset + nbytes].view(self.dtype)
        return entries.view(*side.shape[:-1], self.count, self.across)


@dataclass(frozen=True)
class RowsOfScales:
    """The rows of the scale buffer `name` of the weight at `place`, as copies of rows of side
    channels: each block row fills `height` rows of `row_bytes` bytes.

    `owners` are (rank, place among the rank's own) of each block row; those of a rank follow each
    other from byte `offset` of all its side channels on.
    """

    place: int
    name: str
    dtype: torch.dtype
    row_bytes: int
    height: int
    offset: int
    owners: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def rows(self) -> int:
        """The rows of the buffer."""
        return len(self.owners[0]) * self.height

    def sources(self, stride: int) -> Tensor:
        """Return the place of each row of the buffer in the gathered bytes, int64, in units of UNIT
        bytes. The side channels of a rank are `stride` bytes.
        """
        ranks, places = (torch.tensor(owner) for owner in self.owners)
        begin = self.offset + ranks * stride + places * self.row_bytes
        return (begin // UNIT).repeat_interleave(self.height)


class WeightLayout:
    """The bytes that a rank sends of one weight: its codes, by direction, and its side channel.

    Attributes:
        directions: how many sets of codes travel, 1 or 2.
        code_spans: (start, stop) of each set, of a full shard, in the bytes of codes.
        codes_nbytes: the bytes of all sets, each rounded up to the alignment of operands.
        side_bytes: the bytes of the side channel.
        scalar_offsets: the offsets in it of the scalars of the tensor, by the names of their
            buffers.
        scales: the scales in it, one region for each scale buffer of a gathered weight.
    """

    def __init__(self, geometry: ShardGeometry) -> None:
        self.geometry = geometry
        fmt = geometry.format
        self.directions = 2 if fmt.casts_columnwise else 1
        row = rowwise_data(fmt, 1, geometry.columns, geometry.nominal)
        self._code_dtype = row.dtype
        self._row_bytes = row.shape[1] * row.dtype.itemsize
        code_bytes = geometry.shards.chunk * self._row_bytes
        slot = round_up(code_bytes, OPERAND_ALIGNMENT_BYTES)
        self.code_spans = [(index * slot, index * slot + code_bytes) for index in range(self.directions)]
        self.codes_nbytes = self.directions * slot
        self.side_bytes = HEADER
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
        return self.codes_nbytes + self.side_bytes

    def _reserve(self, nbytes: int) -> int:
        """Return the offset of a new region of the side channel."""
        offset = self.side_bytes
        self.side_bytes += round_up(nbytes, OPERAND_ALIGNMENT_BYTES)
        return offset

    def _add_scales(self, name: str, block: Block | None) -> None:
        """Reserve room for the scales of `block`, one of the format's."""
        if block is None:
            return
        fmt, shards = self.geometry.format, self.geometry.scale_shards
        across = amax_grid(block, shards.rows, self.geometry.columns)[1]
        # Rank 0 owns the most block rows, since its shard begins with one.
        count = shards.owned(0, block[0]).numel
        offset = self._reserve(count * across * fmt.scale_dtype.itemsize)
        repeat = fmt.scale_repeat(columnwise=block is fmt.columnwise_block)
        self.scales.append(ScaleRegion(name, block[0], across, fmt.scale_dtype, repeat, offset, count))

    def codes_in(self, buffer: Tensor) -> list[Tensor]:
        """Return the codes by direction at the beginning of buffers `[..., bytes]`."""
        return [buffer[..., start:stop] for start, stop in self.code_spans]

    def gathered_codes(self, codes: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the buffers of codes of the gathered weight by name. `codes` are those of all
        ranks in order, by direction. Those of inner shards need a copy (`GatheredSide`).
        """
        if self.geometry.inner_shards is not None:
            return {}
        rows, nbytes = self.geometry.rows, self.geometry.rows * self._row_bytes
        matrices = [flat.view(-1)[:nbytes].view(self._code_dtype).view(rows, -1) for flat in codes]
        return dict(zip(CODES, matrices, strict=False))

    def scalars(self, side: Tensor) -> dict[str, Tensor]:
        """Return the scalars in a side channel `[bytes]`, f32[1] by the names of buffers."""
        offsets = self.scalar_offsets.items()
        return {name: side[offset : offset + 4].view(torch.float32) for name, offset in offsets}

    def outgoing_scales(self, side: Tensor, scales: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return pairs (target in the side channels, source) for the scales of the block rows that
        this rank owns.

        The side channels `side`, `[weights, side_bytes]`, and the scale buffers `scales` by name,
        `[weights, ...]`, are those of weights of this layout.
        """
        pairs = []
        for region in self._sent:
            owned = self.geometry.scale_shards.owned(self.geometry.rank, region.height)
            is_one_matrix = self.geometry.matrix_rows is None
            first = owned.start - self.geometry.first_row // region.height if is_one_matrix else 0
            source = scales[region.name][:, :: region.repeat[0], :: region.repeat[1]]
            if owned.numel:
                source = source[:, first : first + owned.numel, : region.across]
                pairs.append((region.of(side)[:, : owned.numel], source))
        return pairs

    def code_specs(self) -> list[tuple[str, Buffer]]:
        """Return the name and buffer of each set of codes of the gathered weight."""
        specs = buffers(self.geometry.format, self.geometry.gathered_shape, self.geometry.nominal)
        return [(name, spec) for name in CODES[: self.directions] if (spec := specs[name]) is not None]

    def scale_specs(self, shape: tuple[int, ...]) -> list[tuple[ScaleRegion, Buffer]]:
        """Return each region of scales with its buffer in a weight of this `shape`: the gathered
        weight, or the one that this rank casts.
        """
        specs = buffers(self.geometry.format, shape, self.geometry.nominal)
        return [(region, spec) for region in self.scales if (spec := specs[region.name]) is not None]

    def scale_rows(self, region: ScaleRegion, spec: Buffer, place: int, first: int) -> RowsOfScales | None:
        """Return the rows by which one indexed copy fills the buffer of a region. None if the
        buffer has padding, a scale fills several columns, or ranks have inner shards.

        The region is of the weight at `place`, whose side channel begins at byte `first` of all.
        """
        if self.geometry.inner_shards is not None:
            return None
        shards = self.geometry.scale_shards
        height, width = region.repeat
        blocks = -(-shards.rows // region.height)
        row_bytes = region.across * spec.dtype.itemsize
        if width != 1 or spec.shape != (blocks * height, region.across) or row_bytes % UNIT:
            return None
        ranks, places = shards.owners(region.height)
        owners = tuple(ranks), tuple(places)
        return RowsOfScales(place, region.name, spec.dtype, row_bytes, height, first + region.offset, owners)


@functools.lru_cache(maxsize=1024)  # the weights of a model repeat a few geometries
def weight_layout(geometry: ShardGeometry) -> WeightLayout:
    """The layout of the weights of one geometry."""
    return WeightLayout(geometry)


@dataclass(frozen=True)
class GatherLayout:
    """The bytes that a rank sends of weights of these `geometries`, which FSDP2 gathers together.

    Attributes:
        keep_codes: True if codes stay in the buffer of the rank between gathers. Otherwise they are
            cast for each gather, into other memory.
    """

    geometries: tuple[ShardGeometry, ...]
    keep_codes: bool

    @functools.cached_property
    def weights(self) -> tuple[WeightLayout, ...]:
        """The layout of each weight."""
        return tuple(map(weight_layout, self.geometries))

    @functools.cached_property
    def kept_bytes(self) -> int:
        """The bytes that a rank keeps between gathers."""
        return sum(self._code_sizes) + self._side_bytes

    @functools.cached_property
    def _code_sizes(self) -> list[int]:
        """The bytes of the codes that are kept of each weight."""
        return [weight.codes_nbytes if self.keep_codes else 0 for weight in self.weights]

    @property
    def _side_bytes(self) -> int:
        return sum(weight.side_bytes for weight in self.weights)

    @property
    def _takes_one_output(self) -> bool:
        """True if FSDP2 takes one output of a weight."""
        return self.geometries[0].world == 1

    def parts(self, buffer: Tensor) -> list[tuple[list[Tensor], Tensor]]:
        """Return (codes by direction, side channel) of each weight in buffers `[..., kept_bytes]`.
        There are no codes if they are not kept.
        """
        first, *others = self._code_sizes
        *codes_of_others, codes_of_first = buffer[..., : -self._side_bytes].split([*others, first], -1)
        all_codes = [codes_of_first, *codes_of_others]
        sides = buffer[..., -self._side_bytes :].split([weight.side_bytes for weight in self.weights], -1)
        return [
            (weight.codes_in(codes) if self.keep_codes else [], side)
            for weight, codes, side in zip(self.weights, all_codes, sides, strict=True)
        ]

    def outputs(self, buffer: Tensor) -> list[tuple[Tensor, ...]]:
        """Return the tensors of `buffer` that the hook of each weight hands to FSDP2. Codes that
        are not kept go before them.
        """
        if self._takes_one_output:
            first, *others = self._code_sizes
            *codes_of_others, of_first = buffer.split([*others, first + self._side_bytes])
            return [(of_first,), *((codes,) for codes in codes_of_others)]
        (codes_of_first, _), *parts = self.parts(buffer)
        return [(*codes_of_first, buffer[-self._side_bytes :]), *(tuple(codes) for codes, _ in parts)]

    def gathered_codes(self, place: int, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the buffers of codes, by name, of the weight at `place` in its `outputs`."""
        weight = self.weights[place]
        codes = weight.codes_in(outputs[0].view(-1)) if self._takes_one_output else outputs[: weight.directions]
        return weight.gathered_codes(codes)

    def gathered_side(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the side channels `[world, bytes]` of all weights in order, in the gathered
        `outputs` of the first weight.
        """
        side = outputs[-1].view(-1)
        if self._takes_one_output:
            side = side[-self._side_bytes :]
        return side.view(-1, self._side_bytes)


def side_by_side(specs: Sequence[Buffer], device: torch.device) -> tuple[Tensor, Iterator[Tensor]]:
    """Allocate buffers in one tensor, aligned as allocations are. Return (the tensor, uint8; the
    uninitialized buffers).
    """
    sizes = [math.prod(spec.shape) * spec.dtype.itemsize for spec in specs]
    padded_sizes = [round_up(size, ALLOCATION_ALIGNMENT_BYTES) for size in sizes]
    memory = torch.empty(sum(padded_sizes), dtype=torch.uint8, device=device)
    parts = zip(memory.split(padded_sizes), sizes, specs, strict=True)
    return memory, (part[:size].view(spec.dtype).view(spec.shape) for part, size, spec in parts)


def header_of(side: Tensor) -> Tensor:
    """Return the headers of side channels `[..., bytes]`: int32 `[..., 2]`, the status of a rank
    and the number of its cast.
    """
    return side[..., :8].view(torch.int32)


class ScaleFill:
    """Puts the gathered scales of a `region` from the side channels `side` `[world, bytes]` into a
    weight's `buffer`.

    All places are found once: FSDP2 gives the same tensors memory at every gather.
    """

    def __init__(
        self, region: ScaleRegion, geometry: ShardGeometry, side: Tensor, buffer: Tensor, padding: float
    ) -> None:
        self._buffer = buffer
        self._padding = padding
        height, width = region.repeat
        shards, inner_shards = geometry.scale_shards, geometry.inner_shards
        blocks, across = -(-shards.rows // region.height), region.across
        if inner_shards is not None and inner_shards.cuts_columns:
            across *= inner_shards.world
        elif inner_shards is not None:
            blocks *= inner_shards.world
        self._pads = buffer.numel() > blocks * height * across * width
        used = buffer[: blocks * height, : across * width]
        target = used.unflatten(1, (across, width)).unflatten(0, (blocks, height))
        # The rank and place of each block row. None if no boundary cuts any.
        self._owners: tuple[Tensor, ...] | None = None
        if inner_shards is not None:
            self._copies = [inner_shards.copy_of_scales(target, region.of(side))]
            return
        sent = region.of(side).unsqueeze(-1)
        if shards.cut(region.height):
            self._owners = tuple(torch.tensor(index, device=side.device) for index in shards.owners(region.height))
            self._copies = [(target, sent)]
            return
        full, rest = divmod(blocks, region.count)
        in_order = sent.unsqueeze(2)
        self._copies = [(target[: full * region.count].unflatten(0, (full, region.count)), in_order[:full])]
        if rest:
            self._copies.append((target[full * region.count :], in_order[full, :rest]))
        self._copies = [(target, sent.expand_as(target)) for target, sent in self._copies]

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return pairs (target, source) whose copies fill the buffer, except padding, with the
        scales of the last gather.
        """
        if self._owners is None:
            return self._copies
        return [(target, sent[self._owners].unsqueeze(1).expand_as(target)) for target, sent in self._copies]

    def pad(self) -> None:
        """Fill the buffer with its padding value if it has padding."""
        if self._pads:
            self._buffer.fill_(self._padding)


class RowFill:
    """Fills a `buffer` `[rows, bytes]` with rows of the side channels `side`, whose places
    `index` says in units.
    """

    def __init__(self, side: Tensor, buffer: Tensor, index: Tensor) -> None:
        self.buffer = buffer
        self.index = index
        self._rows = buffer.view(torch.int64)
        units = side.view(-1).view(torch.int64)
        # A row may begin at any unit.
        across = self._rows.shape[1]
        self._sources = units.as_strided((units.numel() - across + 1, across), (1, 1))

    def run(self) -> None:
        """Copy all rows of what was gathered."""
        torch.index_select(self._sources, 0, self.index, out=self._rows)


# The indices in use. Equal layers share them.
_indices: "weakref.WeakValueDictionary[Any, Tensor]" = weakref.WeakValueDictionary()


def _index_of(rows: tuple[RowsOfScales, ...], stride: int, device: torch.device) -> Tensor:
    """Return the places that the rows of some buffers, in order, are copied from, int32
    (`RowsOfScales.sources`).
    """
    key = rows, stride, device
    index = _indices.get(key)
    if index is None:
        sources = torch.cat([of_buffer.sources(stride) for of_buffer in rows])
        index = _indices[key] = sources.to(device, torch.int32)
    return index


@dataclass(frozen=True)
class InnerShardCodes:
    """The codes `name` of the weight at `place`, `gathered` in `inner_shards`, which are copied to
    a buffer `joined`.
    """

    place: int
    name: str
    inner_shards: InnerShards
    gathered: Tensor
    joined: Buffer


def _inner_shard_codes(
    layouts: Sequence[WeightLayout], outputs: Sequence[Sequence[Tensor]]
) -> Iterator[InnerShardCodes]:
    """Yield the codes of each weight in inner shards among the gathered `outputs` of all."""
    for place, layout in enumerate(layouts):
        inner_shards = layout.geometry.inner_shards
        if inner_shards is not None:
            for (name, joined), gathered in zip(layout.code_specs(), outputs[place], strict=False):
                yield InnerShardCodes(place, name, inner_shards, gathered, joined)


class GatheredSide:
    """The gathered side channels of some weights, `side` `[world, bytes]`, and the buffers that
    they fill. FSDP2 gives the same tensors memory at every gather.

    Attributes:
        headers: the headers of each weight, int32 `[world, 2]`.
        scalars: the scalars of each weight, by the names of buffers.
        buffers: the scale buffers of each weight, by name, and the codes of weights in inner
            shards.
        memory: the memory of all these buffers, one tensor, which FSDP2 allocates and frees. Empty
            if there are no buffers.
        row_fills: the copies that fill the buffers without padding, one for all rows of a length.
            Each other buffer of scales has a ScaleFill.
        gathered_inner_codes: the gathered codes of weights in inner shards. Nothing reads them
            after `fill`.
    """

    def __init__(self, layouts: Sequence[WeightLayout], side: Tensor, outputs: Sequence[Sequence[Tensor]]) -> None:
        """`outputs` are the gathered tensors of each weight, codes first."""
        sides = side.split([layout.side_bytes for layout in layouts], 1)
        self.headers = list(map(header_of, sides))
        # Rank 0 always has rows, so its scalars are those of the weight.
        self.scalars = [layout.scalars(own[0]) for layout, own in zip(layouts, sides, strict=True)]
        self.buffers: list[dict[str, Tensor]] = [{} for _ in layouts]
        self.memory: list[Tensor] = []
        self.row_fills: list[RowFill] = []
        self._scale_fills: list[ScaleFill] = []
        self._copies_of_codes: list[tuple[Tensor, Tensor]] = []
        by_length: dict[int, list[RowsOfScales]] = {}
        # Buffers that are filled one by one: place of the weight, region, and its side channel.
        padded: list[tuple[int, ScaleRegion, Tensor]] = []
        specs: list[Buffer] = []
        inner_codes = list(_inner_shard_codes(layouts, outputs))
        first = 0
        for place, (layout, own_side) in enumerate(zip(layouts, sides, strict=True)):
            for region, spec in layout.scale_specs(layout.geometry.gathered_shape):
                rows = layout.scale_rows(region, spec, place, first)
                if rows is not None:
                    by_length.setdefault(rows.row_bytes, []).append(rows)
                    continue
                padded.append((place, region, own_side))
                specs.append(spec)
            first += layout.side_bytes
        rows_of_length = [
            Buffer((sum(rows.rows for rows in of_length), row_bytes), torch.uint8)
            for row_bytes, of_length in by_length.items()
        ]
        all_specs = [*(codes.joined for codes in inner_codes), *specs, *rows_of_length]
        memory, parts = side_by_side(all_specs, side.device)
        if all_specs:
            self.memory.append(memory)
        for codes in inner_codes:
            buffer = self.buffers[codes.place][codes.name] = next(parts)
            self._copies_of_codes.append(codes.inner_shards.copy_of_elements(buffer, codes.gathered))
        self.gathered_inner_codes = [codes.gathered for codes in inner_codes]
        for (place, region, own_side), spec in zip(padded, specs, strict=True):
            buffer = next(parts)
            self.buffers[place][region.name] = buffer
            self._scale_fills.append(ScaleFill(region, layouts[place].geometry, own_side, buffer, spec.padding))
        for of_length, part in zip(by_length.values(), parts, strict=True):
            for rows, buffer in zip(of_length, part.split([rows.rows for rows in of_length]), strict=True):
                self.buffers[rows.place][rows.name] = buffer.view(rows.dtype)
            index = _index_of(tuple(of_length), side.shape[1], side.device)
            self.row_fills.append(RowFill(side, part, index))

    def fill(self) -> None:
        """Fill all buffers with what the last gather brought. Autograd does not count the writes,
        since they fill memory again that it has saved for a backward pass.
        """
        if not self.memory:
            return
        with torch.no_grad(), torch_fsdp.unversioned(self.memory):
            for row_fill in self.row_fills:
                row_fill.run()
            if self._scale_fills or self._copies_of_codes:
                for scale_fill in self._scale_fills:
                    scale_fill.pad()
                copies = [copy for scale_fill in self._scale_fills for copy in scale_fill.copies()]
                targets, sources = zip(*self._copies_of_codes, *copies, strict=True)
                torch._foreach_copy_(targets, sources)
