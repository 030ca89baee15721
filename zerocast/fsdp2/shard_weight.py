"""ShardWeight: the part of one weight that this rank casts, as a small weight of its own for the stages.

The small weight has the block rows that the shard touches, so that the stages need to know nothing of FSDP2. Two-level scales
come from the tensor amax, which the stage takes as the largest amax of the weight it is given: a block row of no elements at
the end, whose amaxes hold the reduced tensor amax, makes it find that.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from zerocast import layout
from zerocast.formats import AmaxPolicy, Columnwise, FormatSpec, ScaleRule
from zerocast.fsdp2.rows import RowShards
from zerocast.fsdp2.wire import Wire
from zerocast.layout import Span
from zerocast.shard import MasterShard
from zerocast.weight import QuantizedWeight


@dataclass
class ShardWeight:
    """`master` is this rank's FP32 rows of a weight `shape` (local to its tensor-parallel rank), `shards` says which rows.

    `delayed` holds scale and amax_history for delayed scaling and is empty otherwise.
    """

    name: str
    format: FormatSpec
    shape: tuple[int, ...]
    nominal: torch.dtype
    master: Tensor
    shards: RowShards
    rank: int
    delayed: dict[str, Tensor]
    wire: Wire = field(init=False)
    buffer: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.rows, self.columns = layout.matrix_shape(self.shape)
        self.wire = Wire(self.format, self.shards, self.columns)
        blocks = [block[0] for block in (self.format.block, self.format.columnwise_block) if block]
        self.height = max(blocks, default=1)
        touched = self.shards.touched(self.rank, self.height)
        self.first_row = touched.start * self.height
        self.held_rows = min(self.rows, touched.stop * self.height) - self.first_row if touched.numel else 0
        ghost = self.height if self.has_ghost else 0
        self.cast_rows = self.held_rows + ghost if blocks else max(1, self.held_rows)

    @property
    def has_ghost(self) -> bool:
        """Whether a block row of no elements carries the tensor amax."""
        return self.format.scale_rule is ScaleRule.TWO_LEVEL

    @property
    def takes_part(self) -> bool:
        """Whether this rank has anything to compute: for scales of blocks alone, only where it has rows."""
        return self.cast_rows > 0

    @property
    def amaxes(self) -> tuple[int, int]:
        """Number of amaxes in the rowwise grid and in an own columnwise grid of the small weight."""
        return layout.amax_counts(self.format, self.cast_rows, self.columns) if self.takes_part else (0, 0)

    @property
    def has_tensor_slot(self) -> bool:
        """Whether an amax of the whole tensor is reduced."""
        return self.format.has_tensor_amax or self.format.amax_policy is AmaxPolicy.DELAYED

    def grids(self) -> list[tuple[int, int, int]]:
        """(height, across, first amax among this weight's) of each grid whose block rows a boundary can cut."""
        found = []
        if self.format.block:
            height = self.format.block[0]
            found.append((height, layout.amax_grid(self.format.block, self.rows, self.columns)[1], 0))
        if self.format.columnwise_block:
            found.append((self.format.columnwise_block[0], self.columns, self.amaxes[0]))
        return found

    def bind(self, buffer: Tensor) -> MasterShard:
        """Make the small weight over `buffer`, `wire.nbytes` zero bytes; what the stages are given."""
        self.buffer = buffer
        codes, side = self.wire.parts(buffer)
        buffers = dict(self.delayed)
        buffers["rowwise_data"] = codes[0]
        if self.wire.amax_offset is not None:
            buffers["amax"] = side[self.wire.amax_offset :][:4].view(torch.float32)
        if self.wire.scale_offset is not None:
            buffers["rowwise_scale_inv"] = side[self.wire.scale_offset :][:4].view(torch.float32)
        own = self.format.columnwise is Columnwise.OWN_GRID
        shape = (self.cast_rows, self.columns)
        specs = layout.buffers(self.format, shape, self.nominal)
        for scales in self.wire.scales:
            spec = specs[scales.name]
            assert spec is not None
            buffers[scales.name] = torch.full(spec.shape, spec.padding, dtype=spec.dtype, device=buffer.device)
        if own:
            buffers["columnwise_data"] = codes[1]
        weight = QuantizedWeight.of_buffers(shape, self.format, self.nominal, buffers)
        held = self.shards.span(self.rank)
        start = (held.start - self.first_row) * self.columns
        span = Span(start, start + held.numel * self.columns) if held.numel else Span(0, 0)
        data = (codes[0], codes[1]) if own else codes[0]
        self._local = weight
        return MasterShard(weight, self.master.view(-1) if held.numel else None, span, data)

    def outgoing_scales(self) -> list[tuple[Tensor, Tensor]]:
        """(target in the side channel, source in the small weight) of the scales of the block rows owned here."""
        _, side = self.wire.parts(self.buffer)
        pairs = []
        for scales in self.wire.scales:
            owned = self.shards.owned(self.rank, scales.height)
            source = self._local.state.buffers[scales.name]
            assert source is not None
            first = owned.start - self.first_row // scales.height
            if scales.repeat:
                source = source[:: scales.height]
            if owned.numel:
                pairs.append((scales.of(side)[: owned.numel], source[first : first + owned.numel, : scales.across]))
        return pairs
