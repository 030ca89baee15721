"""Gathered: the weight that FSDP2 computes with, over the bytes of all ranks.

Codes and scalars stay where FSDP2 gathered them. Scales are put into the layout that products read. FSDP2 frees both with the
unsharded parameter and fills them again at the next gather, in the same storage: what autograd or a compiled graph saved still
points at it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerocast.formats import layout
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.rows import RowShards
from zerocast.fsdp2.shard_weight import ShardWeight
from zerocast.fsdp2.wire import Scales
from zerocast.weight import QuantizedWeight


class Fill:
    """Puts gathered `scales` from the side channels `side` `[world, bytes]` into a weight's `buffer`.

    What lies where is found once: FSDP2 gives the same tensors memory at every gather.
    """

    def __init__(self, scales: Scales, shards: RowShards, side: Tensor, buffer: Tensor, padding: float) -> None:
        self.scales, self._buffer, self._padding = scales, buffer, padding
        height = scales.height if scales.repeat else 1
        blocks = -(-shards.rows // scales.height)
        self._pads = buffer.numel() > blocks * height * scales.across
        self._sent = scales.of(side)
        target = buffer[: blocks * height, : scales.across].unflatten(0, (blocks, height))
        self._owners: tuple[Tensor, ...] | None = None  # rank and place of each block row, where boundaries cut some
        if shards.cut(scales.height):
            self._owners = tuple(torch.tensor(index, device=side.device) for index in shards.owners(scales.height))
            self._copies = [(target, self._sent)]
            return
        full, rest = divmod(blocks, scales.count)
        in_order = self._sent.unsqueeze(2)
        self._copies = [(target[: full * scales.count].unflatten(0, (full, scales.count)), in_order[:full])]
        if rest:
            self._copies.append((target[full * scales.count :], in_order[full, :rest]))

    def __call__(self) -> None:
        """Fill the buffer."""
        if self._pads:
            self._buffer.fill_(self._padding)
        for target, sent in self._copies:
            target.copy_(sent if self._owners is None else sent[self._owners].unsqueeze(1))


class Gathered:
    """`weight` over the `outputs` of FSDP2's first gather; `inner` are the buffers that are ours."""

    def __init__(self, shard: ShardWeight, outputs: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._wire, shards = shard.wire, shard.shards
        codes, self._side = self._wire.gathered(outputs)
        self._headers = self._side[:, :8].view(torch.int32)
        if self._wire.one_direction:
            codes = codes * 2  # one storage, and what was gathered last is in it
        buffers = dict(zip(("rowwise_data", "columnwise_data"), codes, strict=False))
        if self._wire.amax_offset is not None:
            buffers["amax"] = self._scalar(self._wire.amax_offset)
        if self._wire.scale_offset is not None:
            buffers["rowwise_scale_inv"] = self._scalar(self._wire.scale_offset)
        device = self._side.device
        specs = layout.buffers(shard.format, (shard.rows, shard.columns), dtype)
        self.inner: list[Tensor] = []
        self._fills: list[Fill] = []
        for scales in self._wire.scales:
            spec = specs[scales.name]
            assert spec is not None
            buffers[scales.name] = torch.empty(spec.shape, dtype=spec.dtype, device=device)
            self.inner.append(buffers[scales.name])
            self._fills.append(Fill(scales, shards, self._side, buffers[scales.name], spec.padding))
        self.weight = QuantizedWeight.of_buffers(shard.shape, shard.format, dtype, buffers)
        self.weight.state.columnwise_on_demand = True

    def _scalar(self, offset: int) -> Tensor:
        return self._side[0, offset : offset + 4].view(torch.float32)  # rank 0 always has rows

    def headers(self) -> Tensor:
        """int32 `[world, 2]`: what each rank said of the bytes it sent."""
        return self._headers

    @torch.no_grad()
    def fill(self, columnwise: bool) -> None:
        """Put the gathered scales where products read them; what was derived from earlier bytes is forgotten.

        `columnwise` is the direction that came, where only one did.
        """
        self.weight.state.freshness.cast += 1
        if self._wire.one_direction:
            self.weight.state.gathered_direction = "columnwise" if columnwise else "rowwise"
        with torch_fsdp.unversioned(self.inner):
            for fill in self._fills:
                if not self._wire.one_direction or fill.scales.side == columnwise:
                    fill()
