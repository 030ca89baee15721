"""Group: the ranks that a cast or an optimizer step spans, with each collective as one call."""

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """A process group, or one process without any; collectives over one rank do nothing."""

    handle: dist.ProcessGroup | None
    rank: int
    size: int

    @staticmethod
    def of(group: "GroupLike") -> "Group":
        """From a ProcessGroup, a one-dimensional DeviceMesh, or None: the default group if there is one, else one process.

        Raises ValueError for a mesh of more dimensions and TypeError for anything else.
        """
        if isinstance(group, Group):
            return group
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"the mesh of a cast has one dimension, got {group.ndim}: give mesh['name']")
            group = group.get_group()
        if group is None:
            if not (dist.is_available() and dist.is_initialized()):
                return Group(None, 0, 1)
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group is a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not a member of the group")
        return Group(group, rank, dist.get_world_size(group))

    def duplicate(self, backend: str | None = None) -> "Group":
        """The same ranks in a new process group, of this one's backends or of `backend`, with its timeout; all of them call it."""
        if self.handle is None:
            return self
        ranks = dist.get_process_group_ranks(self.handle)
        backend = backend or dist.get_backend_config(self.handle)  # not that of the default group
        timeout = _timeout(self.handle)
        return Group.of(dist.new_group(ranks, timeout, backend, use_local_synchronization=True))

    def all_reduce_max(self, tensor: Tensor) -> None:
        """MAX in place. NaN never enters: its result would depend on the rank."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.handle)

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """SUM in place, in the order of the communication library."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self.handle)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.handle)
        return values

    def all_gather_into(self, out: Tensor, part: Tensor, async_op: bool = False) -> dist.Work | None:
        """Concatenate every rank's `part` in `out`; `part` may be this rank's slice of it."""
        if self.size == 1:
            out.copy_(part)
            return None
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
        work: dist.Work | None = all_gather(out, part, group=self.handle, async_op=async_op)
        return work

    def reduce_scatter_mean(self, out: Tensor, full: Tensor, async_op: bool = False) -> dist.Work | None:
        """The mean of `full` over the ranks, this rank's slice, added in the order of the communication library."""
        if self.size == 1:
            out.copy_(full)
            return None
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # renamed in torch 2.13
        work: dist.Work | None = reduce_scatter(out, full, dist.ReduceOp.AVG, group=self.handle, async_op=async_op)
        return work

    def all_to_all(self, out: Tensor, full: Tensor, async_op: bool = False) -> dist.Work | None:
        """Slice r of `full` to rank r; `out` holds what every rank sent here, by rank."""
        if self.size == 1:
            out.copy_(full)
            return None
        work: dist.Work | None = dist.all_to_all_single(out, full, group=self.handle, async_op=async_op)
        return work

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's tensor to every rank, in place."""
        if self.size > 1:
            dist.broadcast(tensor, group_src=0, group=self.handle)


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long its collectives wait, the least of its backends; torch has no public name for it."""
    found = []
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        found.append(getattr(options, "_timeout", None))
    known = [timeout for timeout in found if isinstance(timeout, timedelta)]
    if not known:
        logger.warning(
            "the timeout of the process group cannot be read: a group made after it has torch's default timeout"
        )
        return None
    return min(known)


GroupLike = Group | dist.ProcessGroup | DeviceMesh | None
ONE_PROCESS = Group(None, 0, 1)
