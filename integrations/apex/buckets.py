"""Buckets: the bytes of quantized weights in Apex's buckets, and the tensors that it gathers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from zerocast import CastPlan, QuantizedWeight
from zerocast.cast.host import Gather, Host
from zerocast.distributed.bucket import Bucket
from zerocast.distributed.group import Group
from zerocast.optim.bucket_bytes import BucketBytes
from zerocast.weight.buffers import into_flat_buffer
from zerocast.weight.validity import Validity, debugging

ADVICE = (
    "masters that were written by hand are cast by optimizer.refresh(), loaded ones by optimizer.load_state_dict(...)"
)


class QuantizedBucket:
    """A bucket of quantized weights, which are views of its flat bytes.

    A bucket has one flat buffer, and the part of a rank has the bytes of the elements that it
    owns, so that the gather runs in place. A bucket of mxfp8 has a buffer for each direction, one
    of int4 has a buffer of scales too, and Apex gathers one tensor a bucket: the bytes of the
    rank's parts are packed into one tensor, which is unpacked after the gather.

    Attributes:
        bytes: the flat buffers of the bucket.
    """

    def __init__(self, bucket: Bucket, group: Group, device: torch.device) -> None:
        self.bytes = BucketBytes(bucket, device)
        self._group = group
        # The packed tensor, from `all_gather_tensors` to `unpack`.
        self._packed: Tensor | None = None

    def all_gather_tensors(self) -> tuple[Tensor, Tensor]:
        """Return the input and the output of an all-gather: this rank's part, a view, and all
        parts.
        """
        flats, ranks, rank = self.bytes.flats, self._group.size, self._group.rank
        if len(flats) == 1:
            return flats[0].view(ranks, -1)[rank], flats[0]
        parts = self._parts()
        packed = torch.empty((ranks, sum(part.shape[1] for part in parts)), dtype=torch.uint8, device=flats[0].device)
        torch.cat([part[rank] for part in parts], out=packed[rank])
        self._packed = packed
        return packed[rank], packed.view(-1)

    def unpack(self) -> None:
        """Copy a gathered packed tensor into the flat buffers. A second call does nothing."""
        if self._packed is not None:
            parts = self._parts()
            gathered = self._packed.split([part.shape[1] for part in parts], dim=1)
            for part, packed in zip(parts, gathered, strict=True):
                part.copy_(packed)
            self._packed = None

    def _parts(self) -> list[Tensor]:
        """Return the bytes of each flat buffer, uint8 `[ranks, bytes]`."""
        return [flat.view(torch.uint8).view(self._group.size, -1) for flat in self.bytes.flats]


class QuantizedBuckets(dict[int, QuantizedBucket], Gather):
    """The buckets of quantized weights, by Apex's number of the bucket.

    `group` has the ranks that share the masters.
    """

    def __init__(self, buckets: Mapping[int, Bucket], group: Group, device: torch.device) -> None:
        super().__init__({index: QuantizedBucket(bucket, group, device) for index, bucket in buckets.items()})
        self._group = group
        # One buffer for all weights, so that zeroing or reducing all of them is one launch.
        for name in ("rowwise_scale_inv", "columnwise_scale_inv", "amax"):
            kept = [
                weight for bucket in self.values() if not bucket.bytes.gathers(name) for weight in bucket.bytes.weights
            ]
            into_flat_buffer([weight for weight in kept if weight.state.buffers[name] is not None], name)

    def host(self, masters: Mapping[int, Tensor]) -> Host:
        """Apex as a Host. `masters[i]` is this rank's FP32 shard of bucket i."""
        names, owned, starts = [], [], []
        for index, quantized in self.items():
            bucket = quantized.bytes.bucket
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
            weights=self._weights(),
            masters=owned,
            starts=starts,
            gather=self,
            validity=Validity("load a state with optimizer.load_state_dict(...)", advice=ADVICE),
            raises_together=debugging(),
        )

    def prepare(self) -> None:
        """Move weights that were given a different storage back into their bucket."""
        for bucket in self.values():
            bucket.bytes.reclaim()

    def start(self, plan: CastPlan) -> None:
        """All-gather the bytes of the last cast outside Apex's step. Make columnwise copies."""
        for bucket in self.values() if self._group.size > 1 else ():
            bucket.bytes.start(self._group)
            bucket.bytes.wait()
        plan.post_all_gather()

    def finish(self, plan: CastPlan) -> None:
        """Make the columnwise copies after Apex has gathered, unless they are current."""
        if plan.validity.copies != plan.validity.casts:
            for bucket in self.values():
                bucket.unpack()
            plan.post_all_gather()

    def _weights(self) -> list[QuantizedWeight]:
        return [weight for bucket in self.values() for weight in bucket.bytes.weights]
