"""Buckets: the bytes of quantized weights in Apex's buckets, and their all-gathers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from zerocast import CastPlan
from zerocast.cast.host import Gather, Host
from zerocast.distributed.bucket import Bucket
from zerocast.distributed.group import Group
from zerocast.optim.bucket_bytes import BucketBytes
from zerocast.weight.buffers import into_flat_buffer
from zerocast.weight.validity import Validity, debugging

ADVICE = (
    "masters that were written by hand are cast by optimizer.refresh(), loaded ones by optimizer.load_state_dict(...)"
)


class QuantizedBuckets(dict[int, BucketBytes], Gather):
    """The flat bytes of the buckets of quantized weights, by Apex's number of the bucket. The part
    of a rank has the bytes of the elements that it owns, so that gathers run in place.

    `group` has the ranks that share the masters.
    """

    def __init__(self, buckets: Mapping[int, Bucket], group: Group, device: torch.device) -> None:
        super().__init__({index: BucketBytes(bucket, device) for index, bucket in buckets.items()})
        self._group = group
        # One buffer for all weights, so that zeroing or reducing all of them is one launch.
        for name in ("rowwise_scale_inv", "columnwise_scale_inv", "amax"):
            kept = [weight for bucket in self.values() if not bucket.gathers(name) for weight in bucket.weights]
            into_flat_buffer([weight for weight in kept if weight.state.buffers[name] is not None], name)

    def host(self, masters: Mapping[int, Tensor]) -> Host:
        """Apex as a Host. `masters[i]` is this rank's FP32 shard of bucket i."""
        names, owned, starts = [], [], []
        for index, buffers in self.items():
            bucket = buffers.bucket
            for slot in bucket.slots:
                span, start = bucket.owned(slot, self._group.rank)
                # `start` counts from the first bucket, and Apex has a tensor for each.
                start -= bucket.start
                names.append(slot.name)
                owned.append(masters[index][start : start + span.numel])
                starts.append(span.start)
        return Host(
            owner="Apex's DistributedFusedAdam",
            group=self._group,
            names=names,
            weights=[weight for buffers in self.values() for weight in buffers.weights],
            masters=owned,
            starts=starts,
            gather=self,
            validity=Validity("load a state with optimizer.load_state_dict(...)", advice=ADVICE),
            raises_together=debugging(),
        )

    def prepare(self) -> None:
        """Move weights that were given a different storage back into their bucket."""
        for bucket in self.values():
            bucket.reclaim()

    def start(self, plan: CastPlan) -> None:
        """All-gather the bytes of the last cast, and make columnwise copies."""
        if self._group.size > 1:
            for bucket in self.values():
                bucket.start(self._group)
            for bucket in self.values():
                bucket.wait()
        plan.post_all_gather()
