"""GatherLayout: the bytes that a rank sends of one weight, laid out alike on all ranks.

Codes come first, each direction that is sent as an output of its own, so that gathered codes lie in
the order of the weight and need no copy. The last output is the side channel: a header, the scalars
of the tensor, and the scales of the block rows that the rank owns, without the padding and
replication of docs/formats/common.md, which are made after the gather.

Scalars and scales begin at multiples of 16 bytes, in the buffer of a rank and in what FSDP2
gathers: products take the scalars where they lie, and cuBLASLt wants operands and their scales so.

A shard group of one rank sends everything as one output: FSDP2 takes only the first one there
(torch 2.11 and 2.13).

Where codes are cast at each gather (`gather_cast.py`), side channels alone are kept between
gathers, and codes lie in memory of their own.

With `one_direction` a weight whose directions are different codes sends either, never both: behind
the codes of each lies what goes with them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zerocast.formats import Block, Columnwise, ScaleRule
from zerocast.formats.layout import amax_grid, round_up, rowwise_data
from zerocast.fsdp2.shard import RowShards, ShardGeometry

ALIGNMENT = 16  # bytes: where a GEMM wants an operand and its scale to begin
HEADER = ALIGNMENT  # bytes: two int32 and room
# bytes: codes of a rank that are kept unless somebody decides; for so few the launches of casts for
# each gather cost more than the memory is worth
MOST_KEPT = 64 * 2**20


@dataclass(frozen=True)
class ScaleRegion:
    """The scales of one direction in side channel number `side`: `count` block rows of `across`
    entries from byte `offset` on.

    `name` is that of the weight's buffer, of which each scale fills `repeat` rows and columns.
    """

    name: str
    height: int
    across: int
    dtype: torch.dtype
    repeat: Block
    offset: int
    count: int
    side: int

    def of(self, side: Tensor) -> Tensor:
        """`[..., count, across]` of side channels `[..., bytes]`."""
        nbytes = self.count * self.across * self.dtype.itemsize
        entries = side[..., self.offset : self.offset + nbytes].view(self.dtype)
        return entries.view(*side.shape[:-1], self.count, self.across)


class GatherLayout:
    """The layout for shards of one geometry. A rank sends `nbytes` and keeps `kept_bytes` of them
    between gathers: all, or the side channels alone without `keep_codes`.
    """

    def __init__(self, geometry: ShardGeometry, one_direction: bool = False, keep_codes: bool = True) -> None:
        self._geometry, self.one_direction, self.keep_codes = geometry, one_direction, keep_codes
        fmt = geometry.format
        row = rowwise_data(fmt, 1, geometry.columns, geometry.nominal)
        self._row_bytes = row.shape[1] * row.dtype.itemsize
        self.code_bytes = geometry.shards.chunk * self._row_bytes  # of one direction
        self.directions = 2 if fmt.columnwise is Columnwise.OWN_GRID else 1
        self.scales: list[ScaleRegion] = []
        self._sides = [HEADER] * (self.directions if one_direction else 1)
        self.amax_offset = self._reserve(0, 4) if fmt.has_tensor_amax else None
        self.scale_offset = self._reserve(0, 4) if fmt.has_tensor_scale else None
        self._add_scales("rowwise_scale_inv", fmt.block, 0)
        self._add_scales("columnwise_scale_inv", fmt.columnwise_block, len(self._sides) - 1)
        self._sent = list(self.scales)
        if fmt.columnwise is Columnwise.SHARED:  # the scales that are sent fill both buffers
            repeat = fmt.scale_repeat(columnwise=True)
            self.scales.append(replace(self.scales[0], name="columnwise_scale_inv", repeat=repeat))
        self._side_bytes = max(self._sides)
        self.code_slot = round_up(self.code_bytes, ALIGNMENT)
        self.codes_nbytes = self.directions * self.code_slot
        self.nbytes = self.codes_nbytes + len(self._sides) * self._side_bytes
        self.kept_bytes = self.nbytes if keep_codes else self.nbytes - self.codes_nbytes

    def _reserve(self, side: int, nbytes: int) -> int:
        """The offset of a region of a side channel."""
        offset = self._sides[side]
        self._sides[side] += round_up(nbytes, ALIGNMENT)
        return offset

    def _add_scales(self, name: str, block: Block | None, side: int) -> None:
        if block is None:
            return
        rule, shards = self._geometry.format.scale_rule, self._geometry.shards
        dtype = torch.float32 if rule is ScaleRule.FP32 else torch.uint8
        across = amax_grid(block, shards.rows, self._geometry.columns)[1]
        count = shards.most_owned(block[0])
        offset = self._reserve(side, count * across * dtype.itemsize)
        repeat = self._geometry.format.scale_repeat(name.startswith("columnwise"))
        self.scales.append(ScaleRegion(name, block[0], across, dtype, repeat, offset, count, side))

    def parts(self, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """(codes by direction, if they are kept, side channels) of a rank's `buffer` of
        `kept_bytes` bytes, or of buffers `[..., kept_bytes]`.
        """
        pieces = buffer.split(self.kept_bytes // len(self._sides), -1)
        directions = self.directions // len(self._sides) if self.keep_codes else 0
        starts = range(0, directions * self.code_slot, self.code_slot or 1)
        codes = [piece[..., start : start + self.code_bytes] for piece in pieces for start in starts]
        return codes, [piece[..., -self._side_bytes :] for piece in pieces]

    def headers(self, buffer: Tensor) -> list[Tensor]:
        """int32 `[..., 2]`, the status of a rank and the number of its cast, of each side
        channel.
        """
        return [side[..., :8].view(torch.int32) for side in self.parts(buffer)[1]]

    def outputs(self, buffer: Tensor, columnwise: bool) -> tuple[Tensor, ...]:
        """The tensors of `buffer` that the hook hands to FSDP2, behind codes that are not kept;
        `columnwise` chooses where one direction is sent.
        """
        codes, sides = self.parts(buffer)
        if self.one_direction:
            codes, sides = [codes[columnwise]], [sides[columnwise]]
            buffer = buffer.chunk(2)[columnwise]
        return (buffer,) if self._geometry.shards.world == 1 else (*codes, *sides)

    def outgoing_scales(self, buffers: Tensor, made: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(targets in the side channels, sources) of the scales of the block rows that this rank
        owns.

        `buffers` `[weights, kept_bytes]` and the scale buffers `made` `[weights, ...]` belong to
        weights of this layout.
        """
        _, sides = self.parts(buffers)
        pairs = []
        for region in self._sent:
            owned = self._geometry.shards.owned(self._geometry.rank, region.height)
            first = owned.start - self._geometry.first_row // region.height
            source = made[region.name][:, :: region.repeat[0], :: region.repeat[1]]
            if owned.numel:
                source = source[:, first : first + owned.numel, : region.across]
                pairs.append((region.of(sides[region.side])[:, : owned.numel], source))
        return pairs

    def gathered(self, outputs: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """(codes by direction `[rows, row bytes]`, side channels `[world, bytes]`) of what FSDP2
        gathered.
        """
        flat = [output.view(-1) for output in outputs]
        codes, side = flat[:-1], flat[-1]
        shards = self._geometry.shards
        if shards.world == 1:
            sent = self.directions // len(self._sides)
            codes = [side[index * self.code_slot :] for index in range(sent)]
            side = side[-self._side_bytes :]
        size = shards.rows * self._row_bytes
        return [c[:size].view(shards.rows, self._row_bytes) for c in codes], side.view(-1, self._side_bytes)


class ScaleFill:
    """Puts the gathered scales of a `region` from the side channels `side` `[world, bytes]` into a
    weight's `buffer`.

    What lies where is found once: FSDP2 gives the same tensors memory at every gather.
    """

    def __init__(self, region: ScaleRegion, shards: RowShards, side: Tensor, buffer: Tensor, padding: float) -> None:
        self.side, self.buffer, self._padding = region.side, buffer, padding
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

    def pad(self) -> None:
        """Fill the buffer with padding, where it has any."""
        if self._pads:
            self.buffer.fill_(self._padding)


def fill_scales(fills: Sequence[ScaleFill]) -> None:
    """Fill the buffers of all these weights with the scales of the last gather."""
    for fill in fills:
        fill.pad()
    copies = [copy for fill in fills for copy in fill.copies()]
    if copies:
        targets, sources = zip(*copies, strict=True)
        torch._foreach_copy_(targets, sources)
