"""Wire: what a rank sends of one weight, as a layout of bytes that is the same on all ranks.

Codes come first, each direction that is sent as an output of its own, so that gathered codes lie in the order of the weight and
need no copy. The last output is the side channel: a header, the scalars of the tensor, and the scales of the block rows that
the rank owns, without the padding and replication of docs/formats/common.md, which are made after the gather.

Scalars and scales begin at multiples of 16 bytes, in the buffer of a rank and in what FSDP2 gathers: products take the scalars
where they lie, and cuBLASLt wants operands and their scales so.

A shard group of one rank sends everything as one output: FSDP2 takes only the first one there (torch 2.11 and 2.13).

With `one_direction` a weight whose directions are different codes sends either, never both: behind the codes of each lies what goes
with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.formats import Block, Columnwise, FormatSpec, ScaleRule
from zerocast.formats.layout import amax_grid, round_up
from zerocast.fsdp2.rows import RowShards

ALIGNMENT = 16  # bytes: where a GEMM wants an operand and its scale to begin
HEADER = ALIGNMENT  # bytes: two int32 and room


@dataclass(frozen=True)
class Scales:
    """The scales of one direction in side channel number `side`: `count` block rows of `across` entries from byte `offset` on.

    `name` is that of the weight's buffer; `repeat` says that the buffer repeats them for every row of a block.
    """

    name: str
    height: int
    across: int
    dtype: torch.dtype
    repeat: bool
    offset: int
    count: int
    side: int

    @property
    def nbytes(self) -> int:
        """Bytes in the side channel of a rank."""
        return self.count * self.across * self.dtype.itemsize

    def of(self, side: Tensor) -> Tensor:
        """`[..., count, across]` of side channels `[..., bytes]`."""
        entries = side[..., self.offset : self.offset + self.nbytes].view(self.dtype)
        return entries.view(*side.shape[:-1], self.count, self.across)


class Wire:
    """The layout for a weight of `columns` columns whose rows are sharded."""

    def __init__(self, fmt: FormatSpec, shards: RowShards, columns: int, one_direction: bool = False) -> None:
        self.format, self.shards, self.columns, self.one_direction = fmt, shards, columns, one_direction
        self.row_bytes = columns // fmt.elements_per_byte
        self.code_bytes = shards.chunk * self.row_bytes
        self.directions = 2 if fmt.columnwise is Columnwise.OWN_GRID else 1
        self.scales: list[Scales] = []
        self._sides = [HEADER] * (self.directions if one_direction else 1)
        self.amax_offset = self._scalar(fmt.has_tensor_amax)
        self.scale_offset = self._scalar(fmt.block is None)
        self._add_scales("rowwise_scale_inv", fmt.block, 0)
        self._add_scales("columnwise_scale_inv", fmt.columnwise_block, len(self._sides) - 1)
        self.side_bytes = max(self._sides)
        self._code_slot = round_up(self.code_bytes, ALIGNMENT)
        self.nbytes = self.directions * self._code_slot + len(self._sides) * self.side_bytes

    def _scalar(self, present: bool) -> int | None:
        return self._reserve(0, 4) if present else None

    def _reserve(self, side: int, nbytes: int) -> int:
        """The offset of a region of a side channel."""
        offset = self._sides[side]
        self._sides[side] += round_up(nbytes, ALIGNMENT)
        return offset

    def _add_scales(self, name: str, block: Block | None, side: int) -> None:
        if block is None:
            return
        dtype = torch.float32 if self.format.scale_rule is ScaleRule.FP32 else torch.uint8
        across = amax_grid(block, self.shards.rows, self.columns)[1]
        repeat = self.format.scale_rule is ScaleRule.TWO_LEVEL
        count = self.shards.most_owned(block[0])
        offset = self._reserve(side, count * across * dtype.itemsize)
        self.scales.append(Scales(name, block[0], across, dtype, repeat, offset, count, side))

    def parts(self, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """(codes by direction, side channels) of a rank's `buffer` of `nbytes` bytes, or of buffers `[..., nbytes]`."""
        pieces = buffer.split(self.nbytes // len(self._sides), -1)
        starts = range(0, self.directions // len(self._sides) * self._code_slot, self._code_slot or 1)
        codes = [piece[..., start : start + self.code_bytes] for piece in pieces for start in starts]
        return codes, [piece[..., -self.side_bytes :] for piece in pieces]

    def headers(self, buffer: Tensor) -> list[Tensor]:
        """int32 `[..., 2]`, what a rank says and the number of its cast, of each side channel."""
        return [side[..., :8].view(torch.int32) for side in self.parts(buffer)[1]]

    def outputs(self, buffer: Tensor, columnwise: bool) -> tuple[Tensor, ...]:
        """What the hook hands to FSDP2; `columnwise` chooses where one direction is sent."""
        codes, sides = self.parts(buffer)
        if self.one_direction:
            codes, sides = [codes[columnwise]], [sides[columnwise]]
            buffer = buffer.chunk(2)[columnwise]
        return (buffer,) if self.shards.world == 1 else (*codes, *sides)

    def gathered(self, outputs: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """(codes by direction `[rows, row bytes]`, side channels `[world, bytes]`) of what FSDP2 gathered."""
        flat = [output.view(-1) for output in outputs]
        codes, side = flat[:-1], flat[-1]
        if self.shards.world == 1:
            sent = self.directions // len(self._sides)
            codes = [side[index * self._code_slot :] for index in range(sent)]
            side = side[-self.side_bytes :]
        size = self.shards.rows * self.row_bytes
        return [c[:size].view(self.shards.rows, self.row_bytes) for c in codes], side.view(-1, self.side_bytes)
