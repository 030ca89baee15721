"""GatherCast: the codes of a parameter group, cast when FSDP2 gathers it, gone once they are sent.

The codes of a shard are most of what a rank sends, and nobody reads them between two gathers. A
cast therefore leaves amaxes, scales and headers, and FSDP2's hook of a group casts its codes from
the masters by these: one launch for the group's weights of a format, on the stream that FSDP2
copies from. A gather then reads 4 bytes an element and writes a code, as FSDP2 does without
zerocast to send bf16.

Optimizers that step within a backward pass write masters while the pass still gathers the weights
of its forward pass: `hold` keeps their codes until the next cast.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zerocast.cast.delayed_scaling import DelayedScaling
from zerocast.cast.partition import MasterShard
from zerocast.cast.tables import WeightTable, WeightTables
from zerocast.fsdp2.gather_layout import GatherLayout
from zerocast.weight import QuantizedWeight


class GatherCast:
    """The codes of the weights of one gather, in its order: `layouts` by name.

    `shards` are those that this rank has elements of, by name; `offsets` say where each has its
    amaxes in `packed`. Delayed scaling has moved on since the cast: `delayed` knows its scales.
    """

    def __init__(
        self,
        layouts: Mapping[str, GatherLayout],
        shards: Mapping[str, MasterShard],
        offsets: Mapping[str, tuple[int, int]],
        packed: Tensor,
        delayed: DelayedScaling,
        backend: str,
    ) -> None:
        self._names, self._packed = tuple(layouts), packed
        self._directions = [layout.directions for layout in layouts.values()]
        self._sizes = [
            size
            for layout in layouts.values()
            for nbytes, slot in zip(layout.code_bytes, layout.code_slots, strict=True)
            for size in (nbytes, slot - nbytes)
        ]
        self._nbytes = sum(self._sizes)
        self._cast: dict[str, tuple[Tensor, ...]] = {}  # and not yet sent
        self._held = False
        place = torch.empty(self._nbytes, dtype=torch.uint8, device=packed.device)
        tables = WeightTables(packed.device, backend)
        for name, codes in self._by_name(place).items():
            if name in shards:
                shard = _over(shards[name], codes, delayed.cast_scale(name))
                tables.of(shard.weight).add_shard(shard, offsets[name])
        self._tables = tables.freeze()
        self._bases = [base for table in self._tables for base in _code_bases(table)]
        place.untyped_storage().resize_(0)
        self._nothing = torch.empty(0, dtype=torch.uint8, device=packed.device).untyped_storage()

    def _by_name(self, buffer: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """The codes of each weight in a buffer, by direction."""
        parts = iter(buffer.split(self._sizes)[::2])
        return {
            name: tuple(next(parts) for _ in range(directions))
            for name, directions in zip(self._names, self._directions, strict=True)
        }

    @torch.no_grad()
    def cast(self) -> None:
        """Cast the codes from the masters as they are now, by the scales of the last cast."""
        self._cast = {}
        buffer = torch.empty(self._nbytes, dtype=torch.uint8, device=self._packed.device)
        for base in self._bases:
            base.set_(buffer.untyped_storage(), 0, (self._nbytes,), (1,))
        try:
            for table in self._tables:
                table.partial_cast(self._packed, None)
        finally:
            for base in self._bases:
                base.set_(self._nothing)
        self._cast = self._by_name(buffer)

    def take(self, name: str) -> tuple[Tensor, ...]:
        """The codes of a weight by direction, uint8, for one gather: the first weight of a gather
        casts those of all.
        """
        if self._held:
            return self._cast[name]
        if name == self._names[0] or name not in self._cast:
            self.cast()
        return self._cast.pop(name)

    def hold(self) -> None:
        """Keep the codes of the masters as they are now, for all gathers to come."""
        self.cast()
        self._held = True


def _over(shard: MasterShard, codes: Sequence[Tensor], scale: Tensor | None) -> MasterShard:
    """The shard with its codes in `codes`, by the delayed `scale` of the last cast."""
    buffers = {name: buffer for name, buffer in shard.weight.state.buffers.items() if buffer is not None}
    buffers |= {} if scale is None else {"scale": scale}
    buffers |= dict(zip(("rowwise_data", "columnwise_data"), codes, strict=False))
    weight = QuantizedWeight.of_part(shard.weight.shape, shard.weight.format, shard.weight.dtype, buffers)
    return replace(shard, weight=weight, shard_data=(codes[0], codes[1]) if len(codes) > 1 else codes[0])


def _code_bases(table: WeightTable) -> list[Tensor]:
    return [base for name in ("rowwise_data", "columnwise_data") for base in table.buffers[name].tensors]
