"""ShardedWeights: the low-precision side of the optimizer, from masters to gathered bytes."""

from collections.abc import Sequence

from torch import Tensor

from zerocast.arena import into_arena
from zerocast.group import Group
from zerocast.optim.bucket import Bucket
from zerocast.optim.config import ZeroConfig
from zerocast.optim.delayed import DelayedScaling
from zerocast.optim.gather import BucketBytes, WeightGather
from zerocast.optim.masters import Masters
from zerocast.plan import CastPlan


class ShardedWeights:
    """Flat byte buffers, one cast plan over all parameters, and the all-gather."""

    def __init__(self, buckets: Sequence[Bucket], masters: Masters, group: Group, config: ZeroConfig) -> None:
        self.buffers = [BucketBytes(bucket, masters.master.device) for bucket in buckets]
        weights, shards, starts = {}, [], []
        for buffer in self.buffers:
            for slot, weight in zip(buffer.bucket.slots, buffer.weights, strict=True):
                span, views = masters.owned(buffer.bucket, slot)
                weights[slot.name] = weight
                shards.append(views["master"])
                starts.append(span.start)
        for name in ("rowwise_scale_inv", "columnwise_scale_inv", "amax"):
            into_arena([w for w in weights.values() if w.state.buffers[name] is not None], name)
        self.delayed = DelayedScaling(weights, group)
        self.plan = CastPlan(list(weights.values()), shards, starts, group, backend=config.backend)
        self._gather = WeightGather(
            self.buffers, group, self.plan.freshness, self.plan.backend, config.overlap_all_gather
        )

    def update(self, skip: Tensor) -> None:
        """Cast the masters and gather the bytes; where `skip` holds True the bytes stay what they are."""
        self._gather.ready()
        self.delayed.advance(skip)
        self.plan.cast(skip)
        self._gather.start()

    def recast(self) -> None:
        """Make the live bytes anew from the masters, as the last cast did; delayed scaling does not move on."""
        self._gather.ready()
        with self.delayed.replay():
            self.plan.cast()
        if self.delayed.found():  # the first cast found the amax that scales the second
            with self.delayed.replay():
                self.plan.cast()
        self._gather.start()
