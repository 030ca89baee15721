"""GatherLayout: the bytes that a rank sends of one weight, laid out alike on all ranks.

Codes come first, each direction that is sent as an output of its own, so that gathered codes lie in
the order of the weight and need no copy. The last output is the side channel: a header, the scalars
of the tensor, and the scales of the block rows that the rank owns, without the padding and
replication of docs/formats/common.md, which are made after the gather. Weights that FSDP2 gathers
together send their side channels as one, the last output of the first of them (`JointLayout`): the
host works for every output.

Scalars and scales begin at multiples of 16 bytes, in the buffer of a rank and in what FSDP2
gathers: products take the scalars where they lie, and cuBLASLt wants operands and their scales so.

A shard group of one rank sends everything as one output: FSDP2 takes only the first one there
(torch 2.11 and 2.13).

Where codes are cast at each gather (`gather_cast.py`), side channels alone are kept between
gathers, and codes lie in memory of their own.
"""

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zerocast.formats import Block, Columnwise, FormatSpec, ScaleRule
from zerocast.formats.layout import OPERAND_ALIGNMENT_BYTES, Buffer, amax_grid, buffers, round_up, rowwise_data
from zerocast.fsdp2.shard import RowShards, ShardGeometry

HEADER = OPERAND_ALIGNMENT_BYTES  # bytes: two int32 and room
UNIT = 8  # bytes: scales are copied by so many where rows are multiples of it
SCALES = "rowwise_scale_inv", "columnwise_scale_inv"
# bytes: codes of a rank that are kept unless somebody decides; for so few the launches of casts for
# each gather cost more than the memory is worth
MOST_KEPT = 64 * 2**20


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
        """`[..., count, across]` of side channels `[..., bytes]`."""
        nbytes = self.count * self.across * self.dtype.itemsize
        entries = side[..., self.offset : self.offset + nbytes].view(self.dtype)
        return entries.view(*side.shape[:-1], self.count, self.across)


@dataclass(frozen=True)
class RowsOfScales:
    """The rows of a scale buffer as copies of rows of side channels: each block row fills `height`
    rows of `row_bytes` bytes.

    `owners` are (rank, place among the rank's own) of each block row; those of a rank lie one
    behind another from byte `offset` of its side channel on.
    """

    row_bytes: int
    height: int
    offset: int
    owners: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def rows(self) -> int:
        """The rows of the buffer."""
        return len(self.owners[0]) * self.height

    def sources(self, first: int, stride: int) -> Tensor:
        """int64: where each row of the buffer comes from, in units of UNIT bytes of what was
        gathered, where the side channel of rank 0 begins at byte `first` and that of the next one
        `stride` bytes further.
        """
        ranks, places = (torch.tensor(owner) for owner in self.owners)
        begin = first + self.offset + ranks * stride + places * self.row_bytes
        return (begin // UNIT).repeat_interleave(self.height)


class GatherLayout:
    """The layout for shards of one geometry. A rank sends `nbytes` and keeps `kept_bytes` of them
    between gathers: all, or the side channels alone without `keep_codes`.
    """

    def __init__(self, geometry: ShardGeometry, keep_codes: bool = True) -> None:
        self._geometry, self.keep_codes = geometry, keep_codes
        fmt = geometry.format
        self.directions = 2 if fmt.casts_columnwise else 1
        row = rowwise_data(fmt, 1, geometry.columns, geometry.nominal)
        self._row_bytes = [row.shape[1] * row.dtype.itemsize] * self.directions
        self.code_bytes = [geometry.shards.chunk * row for row in self._row_bytes]
        self.code_slots = [round_up(nbytes, OPERAND_ALIGNMENT_BYTES) for nbytes in self.code_bytes]
        self.scales: list[ScaleRegion] = []
        self.side_bytes = HEADER
        # by the names of the buffers
        self.scalar_offsets = {"amax": self._reserve(4)} if fmt.has_tensor_amax else {}
        if fmt.has_tensor_scale:
            self.scalar_offsets[SCALES[0]] = self._reserve(4)
        self._add_scales(SCALES[0], fmt, fmt.block)
        self._add_scales(SCALES[1], fmt, fmt.columnwise_block)
        self._sent = list(self.scales)
        if fmt.columnwise is Columnwise.SHARED:  # the scales that are sent fill both buffers
            repeat = fmt.scale_repeat(columnwise=True)
            self.scales.append(replace(self.scales[0], name="columnwise_scale_inv", repeat=repeat))
        self.codes_nbytes = sum(self.code_slots)
        self.nbytes = self.codes_nbytes + self.side_bytes
        self.kept_bytes = self.nbytes if keep_codes else self.nbytes - self.codes_nbytes

    def _reserve(self, nbytes: int) -> int:
        """The offset of a region of the side channel."""
        offset = self.side_bytes
        self.side_bytes += round_up(nbytes, OPERAND_ALIGNMENT_BYTES)
        return offset

    def _add_scales(self, name: str, fmt: FormatSpec, block: Block | None) -> None:
        """Reserve room for scales of `block`, one of `fmt`'s."""
        if block is None:
            return
        shards = self._geometry.shards
        dtype = torch.float32 if fmt.scale_rule is ScaleRule.FP32 else torch.uint8
        across = amax_grid(block, shards.rows, self._geometry.columns)[1]
        count = shards.most_owned(block[0])
        offset = self._reserve(count * across * dtype.itemsize)
        repeat = fmt.scale_repeat(columnwise=block is fmt.columnwise_block)
        self.scales.append(ScaleRegion(name, block[0], across, dtype, repeat, offset, count))

    def parts(self, buffer: Tensor) -> tuple[list[Tensor], Tensor]:
        """(codes by direction, if they are kept, side channel) of a rank's `buffer` of
        `kept_bytes` bytes, or of buffers `[..., kept_bytes]`.
        """
        return self.codes_in(buffer), buffer[..., -self.side_bytes :]

    def codes_in(self, buffer: Tensor) -> list[Tensor]:
        """The codes by direction at the beginning of what is kept, none if they are not."""
        starts = self._code_starts if self.keep_codes else ()
        return [buffer[..., s : s + n] for s, n in zip(starts, self.code_bytes, strict=False)]

    @property
    def _code_starts(self) -> list[int]:
        return [0, *itertools.accumulate(self.code_slots)][: self.directions]

    def outputs(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """The tensors of `buffer` that the hook hands to FSDP2, behind codes that are not kept."""
        codes, side = self.parts(buffer)
        return (buffer,) if self._geometry.shards.world == 1 else (*codes, side)

    def outgoing_scales(self, side: Tensor, made: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(targets in the side channels, sources) of the scales of the block rows that this rank
        owns.

        The side channels `side`, `[weights, side_bytes]`, and the scale buffers `made`
        `[weights, ...]` belong to weights of this layout.
        """
        pairs = []
        for region in self._sent:
            owned = self._geometry.shards.owned(self._geometry.rank, region.height)
            first = owned.start - self._geometry.first_row // region.height
            source = made[region.name][:, :: region.repeat[0], :: region.repeat[1]]
            if owned.numel:
                source = source[:, first : first + owned.numel, : region.across]
                pairs.append((region.of(side)[:, : owned.numel], source))
        return pairs

    def gathered(self, outputs: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """(codes by direction `[rows, row bytes]`, side channels `[world, bytes]`) of what FSDP2
        gathered, its own side channel last.
        """
        flat = [output.view(-1) for output in outputs]
        codes, side = flat[:-1], flat[-1]
        shards = self._geometry.shards
        if shards.world == 1:
            codes = [side[start:] for start in self._code_starts]
            side = side[-self.side_bytes :]
        return self.gathered_codes(codes), side.view(-1, self.side_bytes)

    def gathered_codes(self, codes: Sequence[Tensor]) -> list[Tensor]:
        """`[rows, row bytes]` of each direction, of outputs that FSDP2 gathered."""
        rows, flat = self._geometry.shards.rows, [c.view(-1) for c in codes]
        return [c[: rows * width].view(rows, width) for c, width in zip(flat, self._row_bytes, strict=False)]

    @property
    def shards(self) -> RowShards:
        """The rows of each rank."""
        return self._geometry.shards

    def scale_specs(self) -> list[tuple[ScaleRegion, Buffer]]:
        """The regions of scales, each with the buffer that a gathered weight has for it."""
        geometry = self._geometry
        specs = buffers(geometry.format, (geometry.rows, geometry.columns), geometry.nominal)
        return [(region, spec) for region in self.scales if (spec := specs[region.name]) is not None]

    def scale_rows(self, region: ScaleRegion, spec: Buffer) -> RowsOfScales | None:
        """How one indexed copy fills the buffer of a region; None where it has padding, or a scale
        fills several columns.
        """
        shards = self._geometry.shards
        height, width = region.repeat
        blocks = -(-shards.rows // region.height)
        row_bytes = region.across * spec.dtype.itemsize
        if width != 1 or spec.shape != (blocks * height, region.across) or row_bytes % UNIT:
            return None
        ranks, places = shards.owners(region.height)
        return RowsOfScales(row_bytes, height, region.offset, (tuple(ranks), tuple(places)))


class JointLayout:
    """The bytes that a rank keeps of weights that are gathered together: their codes, if they are
    kept, and behind these all side channels, one behind another.
    """

    def __init__(self, layouts: Sequence[GatherLayout]) -> None:
        self.layouts = tuple(layouts)
        self._codes = [layout.kept_bytes - layout.side_bytes for layout in layouts]
        self._sides = [layout.side_bytes for layout in layouts]
        self.kept_bytes = sum(self._codes) + sum(self._sides)

    def parts(self, buffer: Tensor) -> list[tuple[list[Tensor], Tensor]]:
        """For each weight (codes by direction, if they are kept, its side channel) of a rank's
        `buffer`, or of buffers `[..., kept_bytes]`.
        """
        pieces = buffer.split([*self._codes, *self._sides], -1)
        both = zip(self.layouts, pieces, pieces[len(self.layouts) :], strict=False)
        return [(layout.codes_in(codes), side) for layout, codes, side in both]

    def outputs(self, place: int, buffer: Tensor) -> tuple[Tensor, ...]:
        """The tensors of `buffer` that the hook of the weight at `place` hands to FSDP2, behind
        codes that are not kept.
        """
        codes, _ = self.parts(buffer)[place]
        return (*codes, buffer[sum(self._codes) :]) if place == 0 else tuple(codes)

    def gathered(self, side: Tensor) -> tuple[Tensor, ...]:
        """The side channels `[world, bytes]` of each weight in what FSDP2 gathered of all."""
        found: tuple[Tensor, ...] = side.view(-1, sum(self._sides)).split(self._sides, 1)
        return found


def header_of(side: Tensor) -> Tensor:
    """int32 `[..., 2]`, the status of a rank and the number of its cast, of side channels
    `[..., bytes]`.
    """
    return side[..., :8].view(torch.int32)


class ScaleFill:
    """Puts the gathered scales of a `region` from the side channels `side` `[world, bytes]` into a
    weight's `buffer`.

    What lies where is found once: FSDP2 gives the same tensors memory at every gather.
    """

    def __init__(self, region: ScaleRegion, shards: RowShards, side: Tensor, buffer: Tensor, padding: float) -> None:
        self.buffer, self._padding = buffer, padding
        height, width = region.repeat
        blocks = -(-shards.rows // region.height)
        self._pads = buffer.numel() > blocks * height * region.across * width
        sent = region.of(side).unsqueeze(-1)
        used = buffer[: blocks * height, : region.across * width]
        target = used.unflatten(1, (region.across, width)).unflatten(0, (blocks, height))
        # rank and place of each block row, where boundaries cut some
        self._owners: tuple[Tensor, ...] | None = None
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
        """(target, source) of the copies that fill the buffer with the scales of the last gather,
        padding apart.
        """
        if self._owners is None:
            return self._copies
        return [(target, sent[self._owners].unsqueeze(1).expand_as(target)) for target, sent in self._copies]

    def run(self) -> None:
        """Fill the buffer with padding, where it has any."""
        if self._pads:
            self.buffer.fill_(self._padding)


class JointFill:
    """Fills the scale buffers of weights that are gathered together from their joint side channels
    `side` `[world, bytes]`: an indexed copy for all rows of one length, whatever weights they
    belong to, and a ScaleFill for each buffer that has padding.

    `buffers` are those of each weight by name, in `memory`, which is all that FSDP2 has to allocate
    and free.
    """

    def __init__(self, layouts: Sequence[GatherLayout], side: Tensor) -> None:
        self.memory: list[Tensor] = []
        self.buffers: list[dict[str, Tensor]] = [{} for _ in layouts]
        self.fills: list[ScaleFill | RowFill] = []
        starts = [0, *itertools.accumulate(layout.side_bytes for layout in layouts)]
        rows: dict[int, list[tuple[RowsOfScales, int, dict[str, Tensor], str, torch.dtype]]] = {}
        for layout, first, own in zip(layouts, starts, self.buffers, strict=False):
            for region, spec in layout.scale_specs():
                found = layout.scale_rows(region, spec)
                if found is not None:
                    rows.setdefault(found.row_bytes, []).append((found, first, own, region.name, spec.dtype))
                    continue
                own[region.name] = torch.empty(spec.shape, dtype=spec.dtype, device=side.device)
                self.memory.append(own[region.name])
                channel = side[:, first : first + layout.side_bytes]
                self.fills.append(ScaleFill(region, layout.shards, channel, own[region.name], spec.padding))
        for row_bytes, members in rows.items():
            buffer = torch.empty(
                sum(found.rows for found, *_ in members), row_bytes, dtype=torch.uint8, device=side.device
            )
            self.memory.append(buffer)
            parts = buffer.split([found.rows for found, *_ in members])
            for (_, _, own, name, dtype), part in zip(members, parts, strict=True):
                own[name] = part.view(dtype)
            sources = tuple((found, first) for found, first, *_ in members)
            self.fills.append(RowFill(side, buffer, _index_of(sources, side.shape[1], side.device)))


# those in use, which equal layers share
_indices: "weakref.WeakValueDictionary[Any, Tensor]" = weakref.WeakValueDictionary()


def _index_of(sources: tuple[tuple[RowsOfScales, int], ...], stride: int, device: torch.device) -> Tensor:
    """int32: where each row of a buffer comes from (`RowsOfScales.sources`), for the rows of some
    weights one behind another, each with the place of its side channel.
    """
    key = sources, stride, device
    found = _indices.get(key)
    if found is None:
        index = torch.cat([rows.sources(first, stride) for rows, first in sources])
        found = _indices[key] = index.to(device, torch.int32)
    return found


class RowFill:
    """Fills a `buffer` `[rows, bytes]` with rows of the side channels `side`, whose places
    `index` says in units.
    """

    def __init__(self, side: Tensor, buffer: Tensor, index: Tensor) -> None:
        self.buffer, self.index = buffer, index
        self._rows = buffer.view(torch.int64)
        units = side.view(-1).view(torch.int64)
        # a row may begin at any unit
        across = self._rows.shape[1]
        self._sources = units.as_strided((units.numel() - across + 1, across), (1, 1))

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """No copies here, since `run` copies all rows."""
        return []

    def run(self) -> None:
        """Copy all rows of what was gathered."""
        torch.index_select(self._sources, 0, self.index, out=self._rows)


def fill_scales(fills: Sequence[ScaleFill | RowFill]) -> None:
    """Fill the buffers of all these weights with the scales of the last gather."""
    for fill in fills:
        fill.run()
    copies = [copy for fill in fills for copy in fill.copies()]
    if copies:
        targets, sources = zip(*copies, strict=True)
        torch._foreach_copy_(targets, sources)
