"""FlatMasters: this rank's flat FP32 master shard with the state of its updates, and the views of
them that belong to each parameter.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from zerocast.distributed.group import Group
from zerocast.formats.layout import Span
from zerocast.optim.bucket import Bucket, Slot, flat_numel
from zerocast.weight import QuantizedWeight

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW
MOMENTUM = ("momentum_buffer",)  # of Muon, whose parameters ranks own in whole


class FlatMasters:
    """Flat tensors, one element for each that this rank owns, bucket after bucket: f32 `master`;
    `exp_avg` and `exp_avg_sq` as far as parameters are cut; f32 `momentum_buffer` of those behind
    them, which ranks own in whole.
    """

    def __init__(
        self, buckets: Sequence[Bucket], group: Group, device: torch.device, moment_dtype: torch.dtype = torch.float32
    ) -> None:
        self._buckets, self._group = list(buckets), group
        numel = flat_numel(self._buckets)
        self.master = torch.zeros(numel, dtype=torch.float32, device=device)
        cut = flat_numel([bucket for bucket in self._buckets if not bucket.storage.whole])
        self.exp_avg, self.exp_avg_sq = (torch.zeros(cut, dtype=moment_dtype, device=device) for _ in MOMENTS)
        self.momentum_buffer = torch.zeros(numel - cut, dtype=torch.float32, device=device)
        for bucket in buckets:
            self._initialise(bucket)

    def _initialise(self, bucket: Bucket) -> None:
        """Rank 0's initial values become everyone's, as in DistributedDataParallel; one bucket
        at a time, or what one rank owns of it in whole.
        """
        shard, size = bucket.shard(self._group.rank), bucket.shard_numel if bucket.storage.whole else bucket.numel
        for part, slots in groupby(bucket.slots, lambda slot: slot.offset // size):
            full, first = torch.zeros(size, dtype=torch.float32, device=self.master.device), part * size
            for slot in slots:
                start = slot.offset - first
                full[start : start + slot.numel].copy_(_initial_value(slot.parameter).reshape(-1))
            self._group.broadcast(full, "the initial values of a bucket")
            mine = Span(first, first + size).intersect(shard)
            start = bucket.start + mine.start - shard.start
            self.master[start : start + mine.numel].copy_(full[mine.start - first : mine.stop - first])
        for slot in bucket.slots:
            if isinstance(slot.parameter, QuantizedWeight):
                slot.parameter.high_precision_init_val = None

    def owned(self, bucket: Bucket, slot: Slot) -> tuple[Span, dict[str, Tensor]]:
        """The elements of a parameter that this rank owns, and their flat masters and the state of
        their update, as views.
        """
        span, start = bucket.owned(slot, self._group.rank)
        views = {"master": self.master[start : start + span.numel]}
        if bucket.storage.whole:
            start -= self.exp_avg.numel()
        for name in fields_of(bucket):
            views[name] = getattr(self, name)[start : start + span.numel]
        return span, views


def fields_of(bucket: Bucket) -> tuple[str, ...]:
    """The state that the update of a bucket's parameters keeps, by its name in torch.optim."""
    return MOMENTUM if bucket.storage.whole else MOMENTS


def _initial_value(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, QuantizedWeight):
        return parameter.detach()
    value = parameter.high_precision_init_val
    return parameter.dequantize() if value is None else value
