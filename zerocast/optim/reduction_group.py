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

from zerocast.distributed.agreement import largest_of_ranks
from zerocast.distributed.group import Group
from zerocast.optim.gradients import reducers

# the groups that were made beside each parent group
_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[_Lease]]" = weakref.WeakKeyDictionary()


class _Lease:
    """A group, and who has it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.owner: weakref.ref[Any] | None = None  # None while nobody is known to have it

    def is_free(self) -> bool:
        """True if its owner is gone."""
        return self.owner is not None and self.owner() is None


def groups_free_on_all(parent: Group, company: bool) -> list[int] | None:
    """The numbers of the groups that no rank's optimizer uses; None if no rank has company and all
    reduce over `parent`. All ranks call it.
    """
    leases = [] if parent.handle is None else _made.get(parent.handle, [])
    any_company, most = largest_of_ranks(parent, [company, len(leases)], "whether optimizers stand side by side")
    if not any_company:
        return None
    used = [not lease.is_free() for lease in leases] + [True] * (most - len(leases))
    used_anywhere = largest_of_ranks(parent, used, "which groups optimizers use") if used else []
    return [number for number, is_used in enumerate(used_anywhere) if not is_used]


def group_of_its_own(parent: Group, owner: Any, free: Sequence[int]) -> Group:
    """The same ranks in another process group, while `owner` lives; all ranks call it, with the
    numbers of the groups that are free on all.

    Each optimizer starts its buckets in one order on every rank, but two of them take turns as
    gradients arrive, and with unused parameters that differs between ranks: on one group they would
    exchange each other's gradients.
    """
    assert parent.handle is not None
    leases = _made.setdefault(parent.handle, [])
    if not free:
        leases.append(_Lease(parent.duplicate()))
    lease = leases[min(free, default=-1)]
    lease.owner = weakref.ref(owner)
    return lease.group.called_by(parent.caller) if parent.caller else lease.group


def has_company(group: Group, parameters: Sequence[Tensor]) -> bool:
    """True if another optimizer of other parameters reduces over this group; one that nobody
    keeps is collected first.
    """

    def found() -> bool:
        return group.size > 1 and any(reducer.stands_beside(group, parameters) for reducer in list(reducers))

    if found():
        gc.collect()
    return found()
