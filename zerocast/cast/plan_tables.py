"""CastTables: the descriptor tables of a plan, for where everything lies now."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocast.cast.host_masters import HostTable, host_tensor
from zerocast.cast.packed_amax import PackedAmax
from zerocast.cast.partition import Partition
from zerocast.cast.tables import WeightTable, WeightTables
from zerocast.formats.layout import Span


@dataclass(frozen=True)
class CastTables:
    """The tables that a cast works by.

    Attributes:
        owned: the weights that this rank computes scales of, with the elements that it owns.
        boundary: the elements of other ranks that it writes beside its own, where two ranks share a
            byte.
        on_host: True if any masters lie on the host, and the weights on another device.
    """

    owned: list[WeightTable]
    boundary: list[WeightTable]
    on_host: bool = False

    @staticmethod
    def of(
        partition: Partition,
        cast: Sequence[int],
        packed: PackedAmax,
        param_groups: Sequence[int | None],
    ) -> "CastTables":
        """The tables of the weights `cast`, whose amaxes lie in `packed`. Local and silent."""
        device, backend, shards = packed.buffer.device, partition.backend, partition.shards
        owned, boundary = WeightTables(device, backend), WeightTables(device, backend)
        on_host = partition.has_host_masters
        mirror = host_tensor(packed.buffer.numel() if on_host else 0, packed.buffer.dtype, device)
        hosted = WeightTables(device, backend, lambda key, device: HostTable(key, device, mirror))
        for index in cast:
            if index not in packed.offsets:
                continue  # others compute its scales
            shard = shards[index]
            master = torch.float32 if shard.master is None else shard.master.dtype
            shared = packed.shared.get(index, -1)
            group = param_groups[index]
            tables = hosted if shard.on_host else owned
            table = tables.of(shard.weight, master, group is not None)
            table.add_shard(shard, packed.offsets[index], group or 0, shared, packed.flag_of.get(index, -1))
        for index, element, slot in packed.boundary_elements:
            shard = shards[index]
            table = boundary.of(shard.weight)
            row = table.add(shard.weight, packed.offsets[index])
            table.set_span(row, shard, Span(element, element + 1), packed.received[slot : slot + 1])
        return CastTables([*owned.freeze(), *hosted.freeze()], boundary.freeze(), on_host)
