"""ShardedWeights: the low-precision side of the optimizer, from masters to gathered bytes."""

from collections.abc import Sequence

import torch

from zerocast.cast.flat_buffer import into_flat_buffer
from zerocast.cast.plan import CastPlan
from zerocast.cast.weight_table import WeightTable
from zerocast.distributed.group import Group
from zerocast.formats import FormatSpec
from zerocast.optim.bucket import Bucket, Slot
from zerocast.optim.bucket_bytes import BucketBytes
from zerocast.optim.config import ZeroConfig
from zerocast.optim.flat_masters import FlatMasters
from zerocast.optim.gather import WeightGather
from zerocast.verification.master_views import MasterView, MasterViews
from zerocast.weight.owners import Claim
from zerocast.weight.write_guard import WriteGuard

ADVICE = "masters that were written by hand, or read from a checkpoint in place, are taken over by optimizer.load_state_dict(...)"

RELOAD = (
    "masters, moments and weights may be of different steps; load a checkpoint (zerocast.optim.load, Checkpoints.load or "
    "load_state_dict), or end the run if ranks have died"
)


class ShardedWeights:
    """Flat byte buffers, one cast plan over all parameters, and the all-gather."""

    def __init__(
        self, buckets: Sequence[Bucket], masters: FlatMasters, group: Group, config: ZeroConfig, claim: Claim
    ) -> None:
        self.buffers = [BucketBytes(bucket, masters.master.device) for bucket in buckets]
        weights, shards, starts, param_groups, cuts = {}, [], [], [], []
        for buffer in self.buffers:
            for slot, weight in zip(buffer.bucket.slots, buffer.weights, strict=True):
                span, views = masters.owned(buffer.bucket, slot)
                weights[slot.name] = weight
                shards.append(views["master"])
                starts.append(span.start)
                param_groups.append(slot.param_group)
                cuts.append(buffer.bucket.cuts(slot))
        for name in ("rowwise_scale_inv", "columnwise_scale_inv", "amax", "scale", "amax_history"):
            gathered = {id(w) for b in self.buffers if b.gathers(name) for w in b.weights}
            held = [w for w in weights.values() if w.state.buffers[name] is not None and id(w) not in gathered]
            into_flat_buffer(held, name)
        self._masters, self._group = masters, group
        self.plan = CastPlan(
            list(weights.values()),
            shards,
            starts,
            group,
            backend=config.backend,
            param_groups=param_groups,
            names=list(weights),
            scale_cuts=cuts,
            guard=WriteGuard(RELOAD),
            claim=claim,
        )
        for weight in weights.values():
            weight.state.set_columnwise_on_demand(not config.keep_columnwise)
        self.plan.delayed.broadcast(group)
        self.plan.freshness.watch([masters.master], sharded=group.size > 1)
        self.plan.freshness.advice = ADVICE
        self.overlap = config.overlap_all_gather
        self.gathers = WeightGather(self.buffers, group, self.plan.freshness, self.plan.backend, self.overlap)

    def master_views(self) -> MasterViews:
        """The masters with the parameters as the model reads them now, wherever those lie."""
        owned = [self._owned(buffer.bucket, slot) for buffer in self.buffers for slot in buffer.bucket.slots]
        return MasterViews(self._group, tuple(owned))

    def formats(self) -> dict[str, tuple[FormatSpec, torch.dtype]]:
        """Format and nominal dtype of each quantized weight by name."""
        weights = {
            s.name: w for buffer in self.buffers for s, w in zip(buffer.bucket.slots, buffer.weights, strict=True)
        }
        return {name: (w.format, w.dtype) for name, w in weights.items() if w.format.element is not None}

    def _owned(self, bucket: Bucket, slot: Slot) -> MasterView:
        span, views = self._masters.owned(bucket, slot)
        return MasterView(slot.name, slot.live_weight(), views["master"], span, self.plan.delayed.cast_scale(slot.name))

    def ready(self, detail: str = "") -> None:
        """The host's part before a step: nothing in flight, everything in its place. RuntimeError
        for what others wrote.

        `detail` is what all ranks must have alike.
        """
        self.gathers.ready()
        self.plan.ready(detail)

    def tables(self) -> list[WeightTable]:
        """What a step works by, after `ready`: where everything lies."""
        return [*self.plan.tables, *self.gathers.tables()]

    def recast(self) -> None:
        """Make the live bytes anew from the masters, as the last cast did; delayed scaling does
        not move on.
        """
        with self.plan.transaction("a cast"):
            self.gathers.reclaim()
            self.plan.cast(repeat=True)
            self.gathers.start()
