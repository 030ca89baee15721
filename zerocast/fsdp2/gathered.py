"""Gathered: the weight that FSDP2 computes with, over the bytes of all ranks.

Codes and scalars stay where FSDP2 gathered them. Scales are put into the layout that products read. FSDP2 frees both with the
unsharded parameter and fills them again at the next gather, in the same storage: what autograd or a compiled graph saved still
points at it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerocast import layout
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.shard_weight import ShardWeight
from zerocast.fsdp2.wire import Scales
from zerocast.weight import QuantizedWeight


class Gathered:
    """`weight` over the `outputs` of FSDP2's first gather; `inner` are the buffers that are ours."""

    def __init__(self, shard: ShardWeight, outputs: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._wire, shards = shard.wire, shard.shards
        codes, self._side = self._wire.gathered(outputs)
        if self._wire.one_direction:
            codes = codes * 2  # one storage, and what was gathered last is in it
        buffers = dict(zip(("rowwise_data", "columnwise_data"), codes, strict=False))
        if self._wire.amax_offset is not None:
            buffers["amax"] = self._scalar(self._wire.amax_offset)
        if self._wire.scale_offset is not None:
            buffers["rowwise_scale_inv"] = self._scalar(self._wire.scale_offset)
        device = self._side.device
        specs = layout.buffers(shard.format, (shard.rows, shard.columns), dtype)
        self._owners: dict[str, tuple[Tensor, ...]] = {}  # rank and place of each block row, where boundaries cut some
        self.inner: list[Tensor] = []
        for scales in self._wire.scales:
            spec = specs[scales.name]
            assert spec is not None
            buffers[scales.name] = torch.empty(spec.shape, dtype=spec.dtype, device=device)
            self.inner.append(buffers[scales.name])
            if shards.cut(scales.height):
                owners = shards.owners(scales.height)
                self._owners[scales.name] = tuple(torch.tensor(index, device=device) for index in owners)
        self._padding = [specs[scales.name].padding for scales in self._wire.scales]  # type: ignore[union-attr]
        self.weight = QuantizedWeight.of_buffers(shard.shape, shard.format, dtype, buffers)
        self.weight.state.was_cast = True
        self.weight.state.columnwise_on_demand = True

    def _scalar(self, offset: int) -> Tensor:
        return self._side[0, offset : offset + 4].view(torch.float32)  # rank 0 always has rows

    def headers(self) -> Tensor:
        """int32 `[world, 2]`: what each rank said of the bytes it sent."""
        return self._side[:, :8].view(torch.int32)

    def _in_order(self, scales: Scales) -> Tensor:
        """The scales of all block rows; without cuts they lie in order."""
        sent = scales.of(self._side)
        if scales.name in self._owners:
            return sent[self._owners[scales.name]]
        return sent.reshape(-1, scales.across)[: -(-self._wire.shards.rows // scales.height)]

    @torch.no_grad()
    def fill(self, columnwise: bool) -> None:
        """Put the gathered scales where products read them; what was derived from earlier bytes is forgotten.

        `columnwise` is the direction that came, where only one did.
        """
        self.weight.state.freshness.cast += 1
        if self._wire.one_direction:
            self.weight.state.only = "columnwise" if columnwise else "rowwise"
        for scales, buffer, padding in zip(self._wire.scales, self.inner, self._padding, strict=True):
            if self._wire.one_direction and scales.side != columnwise:
                continue
            entries = self._in_order(scales)
            if scales.repeat:
                entries = entries.repeat_interleave(scales.height, 0)
            with torch_fsdp.unversioned(buffer):
                buffer.fill_(padding)
                buffer[: entries.shape[0], : scales.across] = entries
