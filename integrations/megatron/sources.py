"""Source: the masters of one DistributedOptimizer as `zerocast.verify` sees them, and whether their bytes have been gathered."""

from collections.abc import Iterator, Sequence
from typing import Any

from zerocast import CastPlan
from zerocast.master_source import MasterSource

from .shards import Shards
from .te_tensors import TETensors


class Source:
    """`shards`, `theirs` among them, as `plan` casts them; `gathers` are the bucket groups that bring their bytes."""

    def __init__(self, plan: CastPlan, shards: Shards, theirs: TETensors, gathers: Sequence[Any]) -> None:
        self._plan, self._shards, self._theirs, self._gathers = plan, shards, theirs, list(gathers)
        self._due: set[int] = set()
        self._claim = plan.claim("an attachment to Megatron-Core")

    def cast(self) -> None:
        """The masters were cast: every bucket group has a gather before it."""
        self._due = set(map(id, self._gathers))

    def gathered(self, bucket_group: Any) -> None:
        """A gather has brought the bytes of the last cast."""
        self._due.discard(id(bucket_group))

    def gather(self) -> None:
        """Gather all bytes now, those on their way first. Collective."""
        for bucket_group in self._gathers:
            finish(bucket_group)
            bucket_group.start_param_sync(force_sync=True)

    def master_sources(self) -> Iterator[MasterSource]:
        """The masters; what no gather has brought since the last cast is gathered first, as the next forward pass would."""
        for bucket_group in self._gathers:
            finish(bucket_group)
            if id(bucket_group) in self._due:
                bucket_group.start_param_sync(force_sync=True)
        self._theirs.follow_copies()
        scales = {id(owned.weight): owned.scale for source in self._plan.master_sources() for owned in source.masters}
        yield MasterSource(self._plan.group, tuple(self._shards.owned(scales)))


def finish(bucket_group: Any) -> None:
    """Wait for a gather in flight, and process what it brought."""
    if bucket_group.param_gather_handle is not None:
        bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)
