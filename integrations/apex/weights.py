"""Weights: the quantized weights of one optimizer, from the masters in Apex's buckets to bytes and columnwise copies."""

from collections.abc import Mapping

import torch
from torch import Tensor

from zerocast import CastPlan
from zerocast.cast.flat_buffer import into_flat_buffer
from zerocast.distributed.group import Group
from zerocast.formats.layout import Span
from zerocast.optim.bucket import Bucket, Slot
from zerocast.verification.master_views import MasterView, MasterViews
from zerocast.weight.write_guard import WriteGuard

from .wire import Wire

RELOAD = (
    "masters, moments and weights may be of different steps; load a state with optimizer.load_state_dict(...), or end the run if "
    "ranks have died"
)
ADVICE = "masters that were written by hand are taken over by optimizer.refresh(), loaded ones by optimizer.load_state_dict(...)"


class Weights:
    """One cast plan over the weights of all buckets.

    `buckets[i]` and `masters[i]` are Apex's bucket i and this rank's f32 shard of it. `group` are the ranks that share the
    masters; `replicas` all that train the model, which start from the delayed scaling of their first.
    """

    def __init__(
        self,
        buckets: Mapping[int, Bucket],
        masters: Mapping[int, Tensor],
        group: Group,
        replicas: Group,
        device: torch.device,
    ) -> None:
        self._group = group
        self.wires = {index: Wire(bucket, group, device) for index, bucket in buckets.items()}
        self._owned: list[tuple[Slot, Tensor, Span]] = []
        for index, bucket in buckets.items():
            for slot in bucket.slots:
                span, start = bucket.owned(slot, group.rank)
                start -= bucket.start  # Apex keeps a tensor a bucket
                self._owned.append((slot, masters[index][start : start + span.numel], span))
        weights = [weight for wire in self.wires.values() for weight in wire.bytes.weights]
        for name in ("rowwise_scale_inv", "columnwise_scale_inv", "amax", "scale", "amax_history"):
            into_flat_buffer([weight for weight in weights if weight.state.buffers[name] is not None], name)
        shards, starts = [master for _, master, _ in self._owned], [span.start for _, _, span in self._owned]
        names = [slot.name for slot, _, _ in self._owned]
        self.plan = CastPlan(weights, shards, starts, group, names=names, guard=WriteGuard(RELOAD))
        self.plan.freshness.advice = ADVICE
        self.plan.delayed.broadcast(replicas)

    def cast(self) -> None:
        """Cast this rank's masters, after their step, into its slices of the buckets. One all-reduce for all weights."""
        self._reclaim()
        self.plan.cast()

    def finish(self) -> None:
        """The gathers of the last cast have ended: make columnwise copies, unless they are there."""
        if self.plan.freshness.columnwise != self.plan.freshness.cast:
            for wire in self.wires.values():
                wire.arrive()
            self.plan.post_all_gather()

    def refresh(self) -> None:
        """Cast the masters as they are, gather and transpose. Delayed scaling does not move on; a lost state is seeded."""
        with self.plan.transaction("a cast"):
            self._reclaim()
            self.plan.cast(repeat=True)
            for wire in self.wires.values():
                wire.bytes.start(self._group)
                wire.bytes.wait()
            self.plan.post_all_gather()

    def master_views(self) -> MasterViews:
        """The masters with the weights as the model reads them now."""
        return MasterViews(self._group, tuple(self._show(*owned) for owned in self._owned))

    def _show(self, slot: Slot, master: Tensor, span: Span) -> MasterView:
        return MasterView(slot.name, slot.live_weight(), master, span, self.plan.delayed.cast_scale(slot.name))

    def _reclaim(self) -> None:
        for wire in self.wires.values():
            wire.bytes.reclaim()
