"""The wire format of a gather: the bytes that a rank sends for the weights that FSDP2 gathers
together, and the buffers that the gathered bytes are copied to. All ranks have the same layout.

FSDP2 gives rank r the rows `[r*C, (r+1)*C)` of the first dimension, with `C = ceil(M / world)`. The
last shards may be short or empty, and a boundary between shards may split a block row. In the
following, rows are those of the weight as a matrix. A rank sends:

    codes of weight 1 | codes of weight 2 | ... | codes of weight 0 | metadata of 0, 1, 2, ...

The codes of each weight and direction are a separate output of its hook, so that gathered codes are
in the order of the weight and need no copy. The metadata of all weights is one output, the last one
of the first weight, since each output costs CPU time. The metadata of a weight consists of a header
(the status of the rank and the number of its cast), the scalars of the tensor, and the scales of
the block rows that the rank owns. Padding and replication of scales (docs/formats/common.md) are
added after the gather.

In a shard group of one rank FSDP2 takes only the first output of a weight (torch 2.11 to 2.13). So
the codes of both directions are one output there, and the metadata follows the codes of the first
weight.

Codes, scalars and scales begin at multiples of 16 bytes, in the buffer of a rank and in the
gathered bytes. Products read the scalars in place, and cuBLASLt needs operands and their scales
aligned.

A weight may be sharded along a dimension other than the first (`Shard(1)` of `shard_placement_fn`).
Each rank then has an *inner shard*, which it casts as a weight by itself, like a slice under tensor
parallelism. Gathers return the inner shards in the order of ranks, and codes and scales are then
copied to their places in the weight.

Layouts depend on shapes, formats and ranks only. If codes are cast at each gather
(`cast_group.py`), a rank keeps the metadata between gathers and no codes.
"""

import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerocast.distributed.row_shards import (
    UNIT,
    InnerShards,
    RowsOfScales,
    ScaleRegion,
    ShardGeometry,
    WeightLayout,
    weight_layout,
)
from zerocast.formats.layout import (
    ALLOCATION_ALIGNMENT_BYTES,
    Buffer,
    round_up,
)
from zerocast.fsdp2 import torch_fsdp


@dataclass(frozen=True)
class GatherLayout:
    """The bytes that a rank sends of weights of these `geometries`, which FSDP2 gathers together.

    Attributes:
        keep_codes: True if codes stay in the buffer of the rank between gathers. Otherwise they are
            cast for each gather, into separate memory.
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
        return sum(self._code_sizes) + self._metadata_bytes

    @functools.cached_property
    def _code_sizes(self) -> list[int]:
        """The number of bytes of kept codes for each weight. 0 if codes are not kept."""
        return [weight.codes_nbytes if self.keep_codes else 0 for weight in self.weights]

    @property
    def _metadata_bytes(self) -> int:
        return sum(weight.metadata_bytes for weight in self.weights)

    @property
    def _takes_one_output(self) -> bool:
        """True if FSDP2 takes only one output of each weight."""
        return self.geometries[0].world == 1

    def parts(self, buffer: Tensor) -> list[tuple[list[Tensor], Tensor]]:
        """Return (codes by direction, metadata) of each weight in buffers `[..., kept_bytes]`.
        There are no codes if they are not kept.
        """
        first, *others = self._code_sizes
        *codes_of_others, codes_of_first = buffer[..., : -self._metadata_bytes].split([*others, first], -1)
        all_codes = [codes_of_first, *codes_of_others]
        all_metadata = buffer[..., -self._metadata_bytes :].split(
            [weight.metadata_bytes for weight in self.weights], -1
        )
        return [
            (weight.codes_in(codes) if self.keep_codes else [], metadata)
            for weight, codes, metadata in zip(self.weights, all_codes, all_metadata, strict=True)
        ]

    def outputs(self, buffer: Tensor) -> list[tuple[Tensor, ...]]:
        """Return the tensors of `buffer` that the hook of each weight returns to FSDP2. If codes
        are not kept, the hook returns those of this gather before them.
        """
        if self._takes_one_output:
            first, *others = self._code_sizes
            *codes_of_others, of_first = buffer.split([*others, first + self._metadata_bytes])
            return [(of_first,), *((codes,) for codes in codes_of_others)]
        (codes_of_first, _), *parts = self.parts(buffer)
        return [(*codes_of_first, buffer[-self._metadata_bytes :]), *(tuple(codes) for codes, _ in parts)]

    def gathered_codes(self, weight_index: int, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the buffers of codes, keyed by name, of the weight at `weight_index` in its
        `outputs`.
        """
        weight = self.weights[weight_index]
        codes = weight.codes_in(outputs[0].view(-1)) if self._takes_one_output else outputs[: weight.directions]
        return weight.gathered_codes(codes)

    def gathered_metadata(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the metadata `[world, bytes]` of all weights in order, in the gathered `outputs`
        of the first weight.
        """
        metadata = outputs[-1].view(-1)
        if self._takes_one_output:
            metadata = metadata[-self._metadata_bytes :]
        return metadata.view(-1, self._metadata_bytes)


def side_by_side(specs: Sequence[Buffer], device: torch.device) -> tuple[Tensor, Iterator[Tensor]]:
    """Allocate buffers in one tensor, aligned as allocations are. Return (the tensor, uint8; the
    uninitialized buffers).
    """
    sizes = [spec.nbytes for spec in specs]
    padded_sizes = [round_up(size, ALLOCATION_ALIGNMENT_BYTES) for size in sizes]
    memory = torch.empty(sum(padded_sizes), dtype=torch.uint8, device=device)
    parts = zip(memory.split(padded_sizes), sizes, specs, strict=True)
    return memory, (part[:size].view(spec.dtype).view(spec.shape) for part, size, spec in parts)


def header_of(metadata: Tensor) -> Tensor:
    """Return the headers of metadata `[..., bytes]`: int32 `[..., 2]`, the status of a rank and the
    number of its cast.
    """
    return metadata[..., :8].view(torch.int32)


class ScaleFill:
    """Copies the gathered scales of a `region` from `metadata` `[world, bytes]` to the `buffer` of
    a weight, and `padding` to the elements of the buffer that have no scale.

    The views are made once, since FSDP2 gives the same tensors memory at every gather.
    """

    def __init__(
        self, region: ScaleRegion, geometry: ShardGeometry, metadata: Tensor, buffer: Tensor, padding: float
    ) -> None:
        self._buffer = buffer
        blocks = _blocks(buffer, region, geometry)
        # None if every element has a scale.
        self._padding = padding if blocks.numel() < buffer.numel() else None
        # The rank that sends each block row, and the index of the block row there. None unless a
        # boundary between shards splits a block row.
        self._owners: tuple[Tensor, ...] | None = None
        # Pairs (target, source). With `_owners`, the source is what they are looked up in.
        self._copies: list[tuple[Tensor, Tensor]]
        sent = region.view(metadata)
        if geometry.inner_shards is not None:
            self._copies = [geometry.inner_shards.copy_of_scales(blocks, sent)]
        elif geometry.scale_shards.cut(region.height):
            owners = geometry.scale_shards.owners(region.height)
            self._owners = tuple(torch.tensor(index, device=metadata.device) for index in owners)
            self._copies = [(blocks, sent)]
        else:
            self._copies = _copies_in_rank_order(blocks, sent)

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return pairs (target, source). Copying them fills the buffer, except its padding, with
        the scales of the last gather.
        """
        if self._owners is None:
            return self._copies
        return [(blocks, _repeated(sent[self._owners], blocks)) for blocks, sent in self._copies]

    def pad(self) -> None:
        """Fill the buffer with its padding value if it has padding."""
        if self._padding is not None:
            self._buffer.fill_(self._padding)


def _blocks(buffer: Tensor, region: ScaleRegion, geometry: ShardGeometry) -> Tensor:
    """Return a view of a scale buffer without its padding, `[block rows, height, block columns,
    width]`: each scale of `region` fills `height` rows and `width` columns.
    """
    block_rows = -(-geometry.scale_shards.rows // region.height)
    block_columns = region.block_columns
    # The region has the scales of one inner shard, and the buffer those of all.
    inner_shards = geometry.inner_shards
    if inner_shards is not None and inner_shards.cuts_columns:
        block_columns *= inner_shards.world
    elif inner_shards is not None:
        block_rows *= inner_shards.world
    height, width = region.repeat
    without_padding = buffer[: block_rows * height, : block_columns * width]
    blocks: Tensor = without_padding.unflatten(1, (block_columns, width)).unflatten(0, (block_rows, height))
    return blocks


def _copies_in_rank_order(blocks: Tensor, sent: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return pairs (target, source) that fill `blocks` (`_blocks`) with the scales that all ranks
    have `sent`, `[world, block rows, block columns]`.

    The first ranks send as many block rows as fit, the next one sends the rest, and the others send
    none.
    """
    most = sent.shape[1]
    full_ranks, rest = divmod(blocks.shape[0], most)
    of_full_ranks = blocks[: full_ranks * most].unflatten(0, (full_ranks, most))
    copies = [(of_full_ranks, _repeated(sent[:full_ranks], of_full_ranks))]
    if rest:
        of_next_rank = blocks[full_ranks * most :]
        copies.append((of_next_rank, _repeated(sent[full_ranks, :rest], of_next_rank)))
    return copies


def _repeated(scales: Tensor, blocks: Tensor) -> Tensor:
    """Return a view of scales `[..., block rows, block columns]` in the shape of `blocks`, `[...,
    block rows, height, block columns, width]`.
    """
    return scales.unsqueeze(-2).unsqueeze(-1).expand_as(blocks)


class RowFill:
    """Copies rows of `metadata` to a `buffer` `[rows, bytes]`. `index` contains the offset of each
    row in the metadata, in units of UNIT bytes.
    """

    def __init__(self, metadata: Tensor, buffer: Tensor, index: Tensor) -> None:
        self.buffer = buffer
        self.index = index
        self._rows = buffer.view(torch.int64)
        units = metadata.view(-1).view(torch.int64)
        # A row may begin at any unit.
        units_per_row = self._rows.shape[1]
        self._sources = units.as_strided((units.numel() - units_per_row + 1, units_per_row), (1, 1))

    def run(self) -> None:
        """Copy all rows of the gathered bytes."""
        torch.index_select(self._sources, 0, self.index, out=self._rows)


def _sources(rows: RowsOfScales, stride: int) -> Tensor:
    """Return the offset of each row of a buffer in the gathered bytes, int64, in units of UNIT
    bytes. The metadata of a rank is `stride` bytes.
    """
    ranks, places = (torch.tensor(owner) for owner in rows.owners)
    begin = rows.offset + ranks * stride + places * rows.row_bytes
    return (begin // UNIT).repeat_interleave(rows.height)


# The indices in use. Equal layers share them.
_indices: "weakref.WeakValueDictionary[Any, Tensor]" = weakref.WeakValueDictionary()


def _index_of(rows: tuple[RowsOfScales, ...], stride: int, device: torch.device) -> Tensor:
    """Return the offsets that the rows of some buffers, in order, are copied from, int32
    (`_sources`).
    """
    key = rows, stride, device
    index = _indices.get(key)
    if index is None:
        sources = torch.cat([_sources(of_buffer, stride) for of_buffer in rows])
        index = _indices[key] = sources.to(device, torch.int32)
    return index


class InnerShardCodes(NamedTuple):
    """The codes of a weight in inner shards, which must be joined after a gather.

    Attributes:
        weight_index: the index of the weight in its group.
        name: the name of the codes' buffer.
        inner_shards: the shards of all ranks.
        gathered: the gathered codes, in the order of ranks.
        joined: the buffer to copy them to.
    """

    weight_index: int
    name: str
    inner_shards: InnerShards
    gathered: Tensor
    joined: Buffer


def _inner_shard_codes(
    layouts: Sequence[WeightLayout], outputs: Sequence[Sequence[Tensor]]
) -> Iterator[InnerShardCodes]:
    """Yield the codes to join of all weights. `outputs` are the gathered tensors of each weight,
    codes first.
    """
    for weight_index, layout in enumerate(layouts):
        inner_shards = layout.geometry.inner_shards
        if inner_shards is not None:
            for (name, joined), gathered in zip(layout.code_specs(), outputs[weight_index], strict=False):
                yield InnerShardCodes(weight_index, name, inner_shards, gathered, joined)


class SingleScales(NamedTuple):
    """A scale buffer that is filled by itself (ScaleFill).

    Attributes:
        weight_index: the index of the weight in its group.
        region: the scales in the metadata.
        spec: the buffer.
    """

    weight_index: int
    region: ScaleRegion
    spec: Buffer


def _scale_buffers(layouts: Sequence[WeightLayout]) -> tuple[list[SingleScales], list[tuple[RowsOfScales, ...]]]:
    """Return (the scale buffers that are filled one by one; those that are filled row by row, in
    groups of buffers with equally long rows).
    """
    single: list[SingleScales] = []
    by_length: dict[int, list[RowsOfScales]] = {}
    # The byte at which the metadata of the weight begins.
    first = 0
    for weight_index, layout in enumerate(layouts):
        for region, spec in layout.scale_specs(layout.geometry.gathered_shape):
            rows = layout.scale_rows(region, spec, weight_index, first)
            if rows is None:
                single.append(SingleScales(weight_index, region, spec))
            else:
                by_length.setdefault(rows.row_bytes, []).append(rows)
        first += layout.metadata_bytes
    return single, [tuple(of_length) for of_length in by_length.values()]


class GatheredMetadata:
    """The gathered `metadata` `[world, bytes]` of the weights of a group, and the buffers that are
    filled from it. All tensors are made once. FSDP2 gives them memory at every gather.

    Attributes:
        headers: the headers of each weight, int32 `[world, 2]`.
        scalars: the scalars of each weight, keyed by the names of buffers.
        buffers: the scale buffers of each weight, keyed by name, and the codes of weights in inner
            shards.
        memory: the memory of all these buffers, one tensor, which FSDP2 allocates and frees. Empty
            if there are no buffers.
        row_fills: the copies that fill buffers without padding, one copy for all rows of the same
            length. Each other scale buffer has a ScaleFill.
        gathered_inner_codes: the gathered codes of weights in inner shards. Nothing reads them
            after `fill`.
    """

    def __init__(self, layouts: Sequence[WeightLayout], metadata: Tensor, outputs: Sequence[Sequence[Tensor]]) -> None:
        """`outputs` are the gathered tensors of each weight, codes first."""
        metadata_of_weights = metadata.split([layout.metadata_bytes for layout in layouts], 1)
        self.headers = list(map(header_of, metadata_of_weights))
        # Rank 0 always has rows, so it sends the scalars of the weight.
        self.scalars = [layout.scalars(own[0]) for layout, own in zip(layouts, metadata_of_weights, strict=True)]

        # One tensor is the memory of all buffers, so their sizes are found before any is made. The
        # loops below take the buffers in the order of these specs.
        inner_codes = list(_inner_shard_codes(layouts, outputs))
        single_scales, rows_by_length = _scale_buffers(layouts)
        specs = [codes.joined for codes in inner_codes]
        specs += [scales.spec for scales in single_scales]
        for all_rows in rows_by_length:
            specs.append(Buffer((sum(rows.rows for rows in all_rows), all_rows[0].row_bytes), "uint8"))
        memory, new_buffers = side_by_side(specs, metadata.device)
        self.memory = [memory] if specs else []
        self.buffers: list[dict[str, Tensor]] = [{} for _ in layouts]

        self.gathered_inner_codes = [codes.gathered for codes in inner_codes]
        self._copies_of_codes: list[tuple[Tensor, Tensor]] = []
        for codes in inner_codes:
            buffer = next(new_buffers)
            self.buffers[codes.weight_index][codes.name] = buffer
            self._copies_of_codes.append(codes.inner_shards.copy_of_elements(buffer, codes.gathered))

        self._scale_fills: list[ScaleFill] = []
        for weight_index, region, spec in single_scales:
            buffer = next(new_buffers)
            self.buffers[weight_index][region.name] = buffer
            geometry, own_metadata = layouts[weight_index].geometry, metadata_of_weights[weight_index]
            self._scale_fills.append(ScaleFill(region, geometry, own_metadata, buffer, spec.padding))

        self.row_fills: list[RowFill] = []
        for all_rows in rows_by_length:
            joint_buffer = next(new_buffers)
            buffers = joint_buffer.split([rows.rows for rows in all_rows])
            for rows, buffer in zip(all_rows, buffers, strict=True):
                self.buffers[rows.weight_index][rows.name] = buffer.view(rows.dtype)
            index = _index_of(all_rows, metadata.shape[1], metadata.device)
            self.row_fills.append(RowFill(metadata, joint_buffer, index))

    def fill(self) -> None:
        """Fill all buffers with the bytes of the last gather. The writes do not increment version
        counters, since autograd may have saved the buffers for a backward pass.
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
