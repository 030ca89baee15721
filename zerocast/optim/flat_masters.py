"""FlatMasters: this rank's flat FP32 master shard and Adam moments, and the views of them that
belong to each parameter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerocast.distributed.group import Group
from zerocast.formats.layout import Span
from zerocast.optim.bucket import Bucket, Slot, flat_numel
from zerocast.weight import QuantizedWeight

FIELDS = ("master", "exp_avg", "exp_avg_sq")


class FlatMasters:
    """Flat tensors, one element for each that this rank owns, bucket after bucket: f32 `master`;
    `exp_avg` and `exp_avg_sq`.
    """

    def __init__(
        self, buckets: Sequence[Bucket], group: Group, device: torch.device, moment_dtype: torch.dtype = torch.float32
    ) -> None:
        self._buckets, self._group = list(buckets), group
        numel = flat_numel(self._buckets)
        self.master = torch.zeros(numel, dtype=torch.float32, device=device)
        self.exp_avg, self.exp_avg_sq = (torch.zeros(numel, dtype=moment_dtype, device=device) for _ in range(2))
        for bucket in buckets:
            self._initialise(bucket)

    def _initialise(self, bucket: Bucket) -> None:
        """Rank 0's initial values become everyone's, as in DistributedDataParallel; one bucket
        at a time.
        """
        full = torch.zeros(bucket.numel, dtype=torch.float32, device=self.master.device)
        for slot in bucket.slots:
            full[slot.offset : slot.offset + slot.numel].copy_(_initial_value(slot.parameter).reshape(-1))
        self._group.broadcast(full, "the initial values of a bucket")
        shard = bucket.shard(self._group.rank)
        self.master[bucket.start : bucket.start + bucket.shard_numel].copy_(full[shard.start : shard.stop])
        for slot in bucket.slots:
            if isinstance(slot.parameter, QuantizedWeight):
                slot.parameter.high_precision_init_val = None

    def owned(self, bucket: Bucket, slot: Slot) -> tuple[Span, dict[str, Tensor]]:
        """The elements of a parameter that this rank owns, and their flat masters and moments,
        as views.
        """
        span, start = bucket.owned(slot, self._group.rank)
        return span, {name: getattr(self, name)[start : start + span.numel] for name in FIELDS}


def _initial_value(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, QuantizedWeight):
        return parameter.detach()
    value = parameter.high_precision_init_val
    return parameter.dequantize() if value is None else value
