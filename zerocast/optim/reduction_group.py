"""The process group over which an optimizer reduces gradients: the given group, or a separate one
with the same ranks if another optimizer reduces over the given group.

Process groups are destroyed together with the default group, and not by an optimizer. So the
separate group of an optimizer that no longer exists is reused by the next one. Otherwise each
optimizer would leave a group behind, with its threads and connections. Ranks collect garbage at
different times, so they exchange which groups are free, and take the first that is free on all.
"""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zerocast.distributed.agreement import largest_of_ranks
from zerocast.distributed.group import Group
from zerocast.optim.gradients import reducers

# The separate groups of each given group.
_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[_Lease]]" = weakref.WeakKeyDictionary()


class _Lease:
    """A separate group and its owner.

    Attributes:
        owner: the optimizer that uses the group; None until the first one is known.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.owner: weakref.ref[Any] | None = None

    def is_free(self) -> bool:
        """Return True if the owner no longer exists."""
        return self.owner is not None and self.owner() is None


def groups_free_on_all(parent: Group, is_shared: bool) -> list[int] | None:
    """Return the numbers of the separate groups that no optimizer on any rank uses. None if no
    separate group is needed, since no other optimizer on any rank uses `parent`. Collective.
    """
    leases = [] if parent.handle is None else _made.get(parent.handle, [])
    is_shared_anywhere, most_leases = largest_of_ranks(
        parent, [is_shared, len(leases)], "whether several optimizers reduce over a group"
    )
    if not is_shared_anywhere:
        return None
    used = [not lease.is_free() for lease in leases] + [True] * (most_leases - len(leases))
    used_anywhere = largest_of_ranks(parent, used, "which groups optimizers use") if used else []
    return [number for number, is_used in enumerate(used_anywhere) if not is_used]


def separate_group(parent: Group, owner: Any, free: Sequence[int]) -> Group:
    """Return a separate process group with the ranks of `parent`, for as long as `owner` exists.
    `free` has the numbers of the groups that are free on all ranks. Collective.

    Each optimizer starts its buckets in the same order on every rank. But the buckets of two
    optimizers alternate as gradients arrive, which may differ between ranks if parameters are
    unused. On one group they would then exchange each other's gradients.
    """
    assert parent.handle is not None
    leases = _made.setdefault(parent.handle, [])
    if not free:
        leases.append(_Lease(parent.duplicate()))
    lease = leases[min(free, default=-1)]
    lease.owner = weakref.ref(owner)
    return lease.group.called_by(parent.caller) if parent.caller else lease.group


def is_shared_with_others(group: Group, parameters: Sequence[Tensor]) -> bool:
    """Return True if an optimizer of different parameters reduces over this group."""

    def is_shared() -> bool:
        return group.size > 1 and any(reducer.coexists_with(group, parameters) for reducer in list(reducers))

    if is_shared():
        # The other optimizer may be unreferenced and not yet garbage-collected.
        gc.collect()
    return is_shared()
