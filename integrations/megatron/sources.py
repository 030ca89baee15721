"""Source: the masters of one DistributedOptimizer as `zerocast.verify` sees them, and whether their bytes have been gathered."""

from collections.abc import Iterator, Sequence
from typing import Any

from zerocast.group import Group
from zerocast.master_source import MasterSource

from .scaling_state import ScalingState
from .shards import Shards


class Source:
    """`shards` over `group`; `gathers` are the bucket groups that bring their bytes."""

    def __init__(self, group: Group, shards: Shards, scaling: ScalingState, gathers: Sequence[Any]) -> None:
        self._group, self._shards, self._scaling, self._gathers = group, shards, scaling, list(gathers)
        self._due: set[int] = set()

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
        yield MasterSource(self._group, tuple(self._shards.owned(self._scaling.scale_of)))


def finish(bucket_group: Any) -> None:
    """Wait for a gather in flight, and process what it brought."""
    if bucket_group.param_gather_handle is not None:
        bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)
