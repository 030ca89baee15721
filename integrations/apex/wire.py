"""Wire: the bytes of one of Apex's buckets, where the weights lie and what its all-gather sends."""

import torch
from torch import Tensor

from zerocast.distributed.group import Group
from zerocast.optim.bucket import Bucket
from zerocast.optim.bucket_bytes import BucketBytes


class Wire:
    """A bucket of quantized weights, which are views of its flat bytes.

    A rank's slice of its one flat buffer holds the bytes of the elements that it owns, so the gather runs in place. mxfp8 has a
    buffer a direction, and Apex gathers one tensor a bucket: its slices are packed side by side, and unpacked after.
    """

    def __init__(self, bucket: Bucket, group: Group, device: torch.device) -> None:
        self.bytes, self._group = BucketBytes(bucket, device), group
        self._packed: Tensor | None = None

    def outgoing(self) -> tuple[Tensor, Tensor]:
        """(part of this rank, all of it): what an all-gather takes. The part is a view of the whole."""
        flats, ranks = self.bytes.flats, self._group.size
        if len(flats) == 1:
            return flats[0].view(ranks, -1)[self._group.rank], flats[0]
        whole = torch.empty(len(flats) * flats[0].numel(), dtype=flats[0].dtype, device=flats[0].device)
        part = whole.view(ranks, -1)[self._group.rank]
        torch.cat([flat.view(ranks, -1)[self._group.rank] for flat in flats], out=part)
        self._packed = whole
        return part, whole

    def arrive(self) -> None:
        """The gather has ended: put what was packed where the weights read it. Once a gather, however often it is called."""
        if self._packed is not None:
            flats, ranks = self.bytes.flats, self._group.size
            for flat, sent in zip(flats, self._packed.view(ranks, len(flats), -1).unbind(1), strict=True):
                flat.view(ranks, -1).copy_(sent)
            self._packed = None
