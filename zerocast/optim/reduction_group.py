"""The process group that an optimizer reduces gradients over: the given one, or one of its own
beside other optimizers.

Destroying a group is up to whoever made the default one. So a group that an optimizer got for
itself is kept when the optimizer is gone, and given to the next one: otherwise each would leave a
group behind, with its threads and connections. Garbage is collected at another time on every rank,
so all ranks exchange which groups are free, and take the first that is free on all.
"""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zerocast.distributed.group import Group
from zerocast.optim.gradients import reducers

# by parent
_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[_Lease]]" = weakref.WeakKeyDictionary()


class _Lease:
    """A group, and who has it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.owner: weakref.ref[Any] | None = None  # None while nobody is known to have it

    def is_free(self) -> bool:
        """Whether its owner is gone."""
        return self.owner is not None and self.owner() is None


def free_groups(parent: Group) -> list[int]:
    """The numbers of those that are free on this rank."""
    leases = [] if parent.handle is None else _made.get(parent.handle, [])
    return [number for number, lease in enumerate(leases) if lease.is_free()]


def group_of_its_own(parent: Group, owner: Any, free_by_rank: list[list[int]]) -> Group:
    """The same ranks in another process group, while `owner` lives; all ranks call it, with what
    all said is free.

    Each optimizer starts its buckets in one order on every rank, but two of them take turns as
    gradients arrive, and with unused parameters that differs between ranks: on one group they would
    exchange each other's gradients.
    """
    assert parent.handle is not None
    leases = _made.setdefault(parent.handle, [])
    free = set(free_by_rank[0]).intersection(*free_by_rank)
    if not free:
        leases.append(_Lease(parent.duplicate()))
    lease = leases[min(free, default=-1)]
    lease.owner = weakref.ref(owner)
    return lease.group.called_by(parent.caller) if parent.caller else lease.group


def has_company(group: Group, parameters: Sequence[Tensor]) -> bool:
    """Whether another optimizer of other parameters reduces over this group; one that nobody
    keeps is collected first.
    """

    def found() -> bool:
        return group.size > 1 and any(reducer.stands_beside(group, parameters) for reducer in list(reducers))

    if found():
        gc.collect()
    return found()
