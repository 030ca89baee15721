"""Weights: the quantized weights of one optimizer, from the masters in Apex's buckets to bytes and columnwise copies."""

import contextlib
from collections.abc import Mapping

import torch
from torch import Tensor

from zerocast import CastPlan
from zerocast.cast.flat_buffer import into_arena
from zerocast.distributed.group import Group
from zerocast.formats.layout import Span
from zerocast.optim.bucket import Bucket, Slot
from zerocast.optim.delayed import DelayedScaling
from zerocast.verification.master_views import MasterSource, OwnedMaster

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
        for name in ("rowwise_scale_inv", "columnwise_scale_inv", "amax"):
            into_arena([weight for weight in weights if weight.state.buffers[name] is not None], name)
        named = {slot.name: weight for (slot, _, _), weight in zip(self._owned, weights, strict=True)}
        self.delayed = DelayedScaling(named, replicas)
        shards, starts = [master for _, master, _ in self._owned], [span.start for _, _, span in self._owned]
        self.plan = CastPlan(weights, shards, starts, group)
        self.plan.freshness.advice = ADVICE
        self._never = torch.zeros(1, dtype=torch.bool, device=device)

    def cast(self) -> None:
        """Cast this rank's masters, after their step, into its slices of the buckets. One all-reduce for all weights."""
        self._reclaim()
        self.delayed.advance(self._never)
        self.plan.cast()

    def finish(self) -> None:
        """The gathers of the last cast have ended: make columnwise copies, unless they are there."""
        if self.plan.freshness.columnwise != self.plan.freshness.cast:
            for wire in self.wires.values():
                wire.arrive()
            self.plan.post_all_gather()

    def refresh(self) -> None:
        """Cast the masters as they are, gather and transpose. Delayed scaling does not move on; a lost state is seeded."""
        with self.writing("a cast"):
            self._reclaim()
            for _ in range(2):
                with self.delayed.replay():
                    self.plan.cast()
                if not self.delayed.found():  # else that cast found the amax which scales the next
                    break
            for wire in self.wires.values():
                wire.bytes.start(self._group)
                wire.bytes.wait()
            self.plan.post_all_gather()

    def writing(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Within, masters and weights belong to different steps; what raises in here leaves them torn until a state is loaded."""
        return self.plan.freshness.writing(what, RELOAD)

    @property
    def is_torn(self) -> bool:
        """Whether something raised while it wrote masters or weights, and no state was loaded since."""
        return self.plan.freshness.is_torn

    def check_whole(self) -> None:
        """RuntimeError while masters and weights are torn."""
        self.plan.freshness.check_whole()

    def master_source(self) -> MasterSource:
        """The masters with the weights as the model reads them now."""
        return MasterSource(self._group, tuple(self._show(*owned) for owned in self._owned))

    def _show(self, slot: Slot, master: Tensor, span: Span) -> OwnedMaster:
        scale = self.delayed.views.get(slot.name, {}).get("cast_scale")
        return OwnedMaster(slot.name, slot.live_weight(), master, span, scale)

    def _reclaim(self) -> None:
        for wire in self.wires.values():
            wire.bytes.reclaim()
