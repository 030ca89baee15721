"""Buckets: where quantized weights lie in Apex's buckets, and what its all-gathers send."""

from collections.abc import Mapping

import torch
from torch import Tensor

from zerocast import CastPlan, QuantizedWeight
from zerocast.cast.flat_buffer import into_flat_buffer
from zerocast.distributed.group import Group
from zerocast.integrations.host_adapter import HostAdapter
from zerocast.optim.bucket import Bucket
from zerocast.optim.bucket_bytes import BucketBytes
from zerocast.weight.validity import Validity

ADVICE = "masters that were written by hand are taken over by optimizer.refresh(), loaded ones by optimizer.load_state_dict(...)"


class QuantizedBucket:
    """A bucket of quantized weights, which are views of its flat bytes.

    A rank's slice of its one flat buffer holds the bytes of the elements that it owns, so the
    gather runs in place. mxfp8 has a buffer a direction, and Apex gathers one tensor a bucket: its
    slices are packed side by side, and unpacked after.
    """

    def __init__(self, bucket: Bucket, group: Group, device: torch.device) -> None:
        self.bytes, self._group = BucketBytes(bucket, device), group
        self._packed: Tensor | None = None

    def all_gather_tensors(self) -> tuple[Tensor, Tensor]:
        """(part of this rank, all of it): what an all-gather takes.

        The part is a view of the whole.
        """
        flats, ranks = self.bytes.flats, self._group.size
        if len(flats) == 1:
            return flats[0].view(ranks, -1)[self._group.rank], flats[0]
        whole = torch.empty(len(flats) * flats[0].numel(), dtype=flats[0].dtype, device=flats[0].device)
        part = whole.view(ranks, -1)[self._group.rank]
        torch.cat([flat.view(ranks, -1)[self._group.rank] for flat in flats], out=part)
        self._packed = whole
        return part, whole

    def unpack(self) -> None:
        """After a gather: put what was packed where the weights read it.

        A second call does nothing.
        """
        if self._packed is not None:
            flats, ranks = self.bytes.flats, self._group.size
            for flat, sent in zip(flats, self._packed.view(ranks, len(flats), -1).unbind(1), strict=True):
                flat.view(ranks, -1).copy_(sent)
            self._packed = None


class QuantizedBuckets(dict[int, QuantizedBucket]):
    """The buckets of quantized weights, by Apex's number.

    `group` are the ranks that share the masters.
    """

    def __init__(self, buckets: Mapping[int, Bucket], group: Group, device: torch.device) -> None:
        super().__init__({index: QuantizedBucket(bucket, group, device) for index, bucket in buckets.items()})
        self._group = group
        for name in ("rowwise_scale_inv", "columnwise_scale_inv", "amax"):
            into_flat_buffer([weight for weight in self._weights() if weight.state.buffers[name] is not None], name)

    def adapter(self, masters: Mapping[int, Tensor]) -> HostAdapter:
        """The facts of Apex; `masters[i]` is this rank's f32 shard of bucket i."""
        names, owned, starts = [], [], []
        for index, quantized in self.items():
            bucket = quantized.bytes.bucket
            for slot in bucket.slots:
                span, start = bucket.owned(slot, self._group.rank)
                start -= bucket.start  # Apex keeps a tensor a bucket
                names.append(slot.name)
                owned.append(masters[index][start : start + span.numel])
                starts.append(span.start)
        return HostAdapter(
            owner="Apex's DistributedFusedAdam",
            group=self._group,
            names=names,
            weights=self._weights(),
            masters=owned,
            starts=starts,
            before_cast=self.reclaim,
            gather=self.gather,
            validity=Validity("load a state with optimizer.load_state_dict(...)", advice=ADVICE),
        )

    def reclaim(self) -> None:
        """Bring back weights that were moved to other storage."""
        for bucket in self.values():
            bucket.bytes.foreign_writes.reclaim()

    def gather(self, plan: CastPlan) -> None:
        """All-gather the bytes of the last cast, without Apex, and make the columnwise copies."""
        for bucket in self.values():
            bucket.bytes.start(self._group)
            bucket.bytes.wait()
        plan.post_all_gather()

    def finish(self, plan: CastPlan) -> None:
        """Make the columnwise copies after Apex has gathered, unless they are there."""
        if plan.validity.copies != plan.validity.casts:
            for bucket in self.values():
                bucket.unpack()
            plan.post_all_gather()

    def _weights(self) -> list[QuantizedWeight]:
        return [weight for bucket in self.values() for weight in bucket.bytes.weights]
