"""The global gradient norm, and the clip factor that follows from it."""

import torch
from torch import Tensor

from zerocast.group import Group
from zerocast.layout import round_up
from zerocast.optim.bucket import ALIGNMENT, Bucket

FAN_IN = 64  # of the fixed tree that adds partial sums
PARTS = 64  # sums need f64 copies: of one part at a time
SMALLEST_PART = 2**16


def square_sum(shard: Tensor, group: Group) -> Tensor:
    """Sum of squares of all ranks' gradients, f64[]; in the order of the libraries."""
    parts = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in _parts(shard)]
    total = torch.stack(parts).square().sum()
    group.all_reduce_sum(total, "the gradient norm")
    return total


class LogicalOrder:
    """Sums of squares in an order that the sharding does not change.

    Chunks of `ALIGNMENT` elements never straddle two ranks and lie alike in a parameter whatever the number of ranks. Their
    f64 sums are gathered, put into the order of registration, and added by a tree of fixed shape.
    """

    def __init__(self, buckets: list[Bucket], names: list[str], group: Group, device: torch.device) -> None:
        self._group = group
        per_rank = sum(bucket.shard_numel for bucket in buckets) // ALIGNMENT
        self._gathered = torch.zeros(group.size * per_rank, dtype=torch.float64, device=device)
        places = {}
        for bucket in buckets:
            for slot in bucket.slots:
                first, last = slot.offset // ALIGNMENT, -(-(slot.offset + slot.numel) // ALIGNMENT)
                chunk = torch.arange(first, last)
                per_shard = bucket.shard_numel // ALIGNMENT
                places[slot.name] = (chunk // per_shard) * per_rank + bucket.start // ALIGNMENT + chunk % per_shard
        self._order = torch.cat([places[name] for name in names]).to(device)

    def square_sum(self, shard: Tensor) -> Tensor:
        """Sum of squares of all ranks' gradients, f64[]."""
        sums = torch.cat([part.view(-1, ALIGNMENT).double().square().sum(1) for part in _parts(shard)])
        self._group.all_gather_into(self._gathered, sums, what="the gradient norm")
        level = self._gathered[self._order]
        while level.numel() > 1:
            level = torch.nn.functional.pad(level, (0, -level.numel() % FAN_IN)).view(-1, FAN_IN).sum(1)
        return level.view(())


def _parts(shard: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = shard.split(max(SMALLEST_PART, round_up(shard.numel() // PARTS, ALIGNMENT)))
    return parts


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of f32[] `norm` are multiplied by: `min(1, max_norm / (norm + 1e-6))`, f32[1], as in torch."""
    factor = torch.full_like(norm, max_norm) / (norm + 1e-6)  # a tensor above: torch's `scalar / tensor` rounds twice
    return factor.clamp(max=1.0).view(1)
