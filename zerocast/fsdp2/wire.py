"""Wire: what a rank sends of one weight, as a layout of bytes that is the same on all ranks.

Codes come first, each direction that is sent as an output of its own, so that gathered codes lie in the order of the weight and
need no copy. The last output is the side channel: a header, the scalars of the tensor, and the scales of the block rows that
the rank owns, without the padding and replication of formats.md, which are made after the gather.

A shard group of one rank sends everything as one output: FSDP2 takes only the first one there (torch 2.11 and 2.13).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.formats import Block, Columnwise, FormatSpec, ScaleRule
from zerocast.fsdp2.rows import RowShards
from zerocast.layout import amax_grid, round_up

ALIGNMENT = 16  # bytes: where a GEMM wants an operand to begin
HEADER = 16  # bytes: two int32 and room


@dataclass(frozen=True)
class Scales:
    """The scales of one direction in the side channel: `count` block rows of `across` entries from byte `offset` on.

    `name` is that of the weight's buffer; `repeat` says that the buffer repeats them for every row of a block.
    """

    name: str
    height: int
    across: int
    dtype: torch.dtype
    repeat: bool
    offset: int
    count: int

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

    def __init__(self, fmt: FormatSpec, shards: RowShards, columns: int) -> None:
        self.format, self.shards, self.columns = fmt, shards, columns
        self.row_bytes = columns // fmt.elements_per_byte
        self.code_bytes = shards.chunk * self.row_bytes
        self.directions = 2 if fmt.columnwise is Columnwise.OWN_GRID else 1
        self.scales: list[Scales] = []
        self._side = HEADER
        self.amax_offset = self._scalar(fmt.has_tensor_amax)
        self.scale_offset = self._scalar(fmt.block is None)
        self._add_scales("rowwise_scale_inv", fmt.block)
        self._add_scales("columnwise_scale_inv", fmt.columnwise_block)
        self.side_bytes = round_up(self._side, ALIGNMENT)
        self._code_slot = round_up(self.code_bytes, ALIGNMENT)
        self.nbytes = self.directions * self._code_slot + self.side_bytes

    def _scalar(self, present: bool) -> int | None:
        offset = self._side
        self._side += 4 if present else 0
        return offset if present else None

    def _add_scales(self, name: str, block: Block | None) -> None:
        if block is None:
            return
        dtype = torch.float32 if self.format.scale_rule is ScaleRule.FP32 else torch.uint8
        across = amax_grid(block, self.shards.rows, self.columns)[1]
        repeat = self.format.scale_rule is ScaleRule.TWO_LEVEL
        scales = Scales(name, block[0], across, dtype, repeat, self._side, self.shards.most_owned(block[0]))
        self._side = round_up(self._side + scales.nbytes, 4)
        self.scales.append(scales)

    def parts(self, buffer: Tensor) -> tuple[list[Tensor], Tensor]:
        """(codes by direction, side channel) of a rank's `buffer` of `nbytes` bytes."""
        starts = range(0, self.directions * self._code_slot, self._code_slot or 1)
        return [buffer[start : start + self.code_bytes] for start in starts], buffer[-self.side_bytes :]

    def outputs(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """What the hook hands to FSDP2."""
        codes, side = self.parts(buffer)
        return (buffer,) if self.shards.world == 1 else (*codes, side)

    def gathered(self, outputs: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """(codes by direction `[rows, row bytes]`, side channels `[world, bytes]`) of what FSDP2 gathered."""
        flat = [output.view(-1) for output in outputs]
        codes, side = self.parts(flat[0]) if self.shards.world == 1 else (flat[:-1], flat[-1])
        size = self.shards.rows * self.row_bytes
        return [c[:size].view(self.shards.rows, self.row_bytes) for c in codes], side.view(-1, self.side_bytes)
