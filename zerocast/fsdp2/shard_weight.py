"""ShardWeight: the part of one weight that this rank casts, as a small weight of its own for the stages.

The small weight has the block rows that the shard touches, so that the stages need to know nothing of FSDP2. Two-level scales
come from the tensor amax, which the stage takes as the largest amax of the weight it is given: a block row of no elements at
the end, whose amaxes hold the reduced tensor amax, makes it find that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zerocast.cast.partition import MasterShard
from zerocast.formats import AmaxPolicy, Columnwise, FormatSpec, ScaleRule, layout
from zerocast.formats.layout import Span
from zerocast.fsdp2.rows import RowShards
from zerocast.fsdp2.wire import Wire
from zerocast.weight import QuantizedWeight

# what a rank says of its shard since the last cast: an empty one has nothing to say, a torn one was left half written
CLEAN, WRITTEN, EMPTY, TORN = range(4)


@dataclass
class ShardWeight:
    """`master` is this rank's FP32 rows of a weight `shape` (local to its tensor-parallel rank), `shards` says which rows.

    `delayed` holds scale and amax_history for delayed scaling and is empty otherwise. `one_direction` is that of its `Wire`.
    """

    name: str
    format: FormatSpec
    shape: tuple[int, ...]
    nominal: torch.dtype
    master: Tensor
    shards: RowShards
    rank: int
    delayed: dict[str, Tensor]
    one_direction: bool
    wire: Wire = field(init=False)
    headers: list[Tensor] = field(init=False)  # int32 `[2]` in each side channel
    _outputs: list[tuple[Tensor, ...]] = field(init=False)  # by direction

    def __post_init__(self) -> None:
        self.rows, self.columns = layout.matrix_shape(self.shape)
        self.wire = Wire(self.format, self.shards, self.columns, self.one_direction)
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

    def bind(self, buffer: Tensor, scales: Mapping[str, Tensor]) -> MasterShard:
        """Make the small weight over `buffer`, `wire.nbytes` zero bytes, and `scales` buffers; what the stages are given."""
        codes, (side, *_) = self.wire.parts(buffer)
        self.headers = self.wire.headers(buffer)
        self._outputs = [self.wire.outputs(buffer, columnwise) for columnwise in (False, True)]
        buffers = {**self.delayed, **scales}
        buffers["rowwise_data"] = codes[0]
        if self.wire.amax_offset is not None:
            buffers["amax"] = side[self.wire.amax_offset :][:4].view(torch.float32)
        if self.wire.scale_offset is not None:
            buffers["rowwise_scale_inv"] = side[self.wire.scale_offset :][:4].view(torch.float32)
        own = self.format.columnwise is Columnwise.OWN_GRID
        if own:
            buffers["columnwise_data"] = codes[1]
        weight = QuantizedWeight.of_buffers((self.cast_rows, self.columns), self.format, self.nominal, buffers)
        data = (codes[0], codes[1]) if own else codes[0]
        return MasterShard(weight, self.master.view(-1) if self.span.numel else None, self.span, data)

    @property
    def says(self) -> int:
        """What the header says after a cast."""
        return CLEAN if self.span.numel else EMPTY

    def say(self, said: int) -> None:
        """Change what the header says until the next cast."""
        for header in self.headers:
            header[0].fill_(said)

    def outputs(self, columnwise: bool) -> tuple[Tensor, ...]:
        """What is handed to FSDP2, on the device of the master; `columnwise` chooses where one direction is sent."""
        return self._outputs[columnwise]

    @property
    def span(self) -> Span:
        """The elements of the small weight that this rank holds."""
        held = self.shards.span(self.rank)
        start = (held.start - self.first_row) * self.columns
        return Span(start, start + held.numel * self.columns) if held.numel else Span(0, 0)

    def outgoing_scales(self, buffers: Tensor, made: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(targets in the side channels, sources) of the scales of the block rows owned here, for weights like this one.

        `buffers` `[weights, bytes]` and the scale buffers `made` `[weights, ...]` belong to weights of the same geometry.
        """
        _, sides = self.wire.parts(buffers)
        pairs = []
        for scales in self.wire.scales:
            owned = self.shards.owned(self.rank, scales.height)
            first = owned.start - self.first_row // scales.height
            source = made[scales.name]
            if scales.repeat:
                source = source[:, :: scales.height]
            if owned.numel:
                source = source[:, first : first + owned.numel, : scales.across]
                pairs.append((scales.of(sides[scales.side])[:, : owned.numel], source))
        return pairs
