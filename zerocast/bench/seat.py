"""Seat: one rank of many without the others, so that one device does exactly one rank's share of a cast."""

from dataclasses import dataclass, replace

from torch import Tensor

from zerocast.bench.workload import Workload
from zerocast.distributed.agreement import Reply
from zerocast.distributed.group import Group


@dataclass(frozen=True)
class Seat(Group):
    """A group whose other members are worked out instead of asked: they pass the same weights and own the other shards.

    A plan built in it has amaxes and scales for every weight, as it has on a cluster. Collectives move nothing: their time is the
    network's and not measured here.
    """

    workload: Workload

    @staticmethod
    def at(workload: Workload) -> "Seat":
        """The seat of the workload's rank."""
        return Seat(None, workload.rank, workload.world, workload)

    def all_gather_object(self, value: Reply, what: str = "") -> list[Reply]:
        """What a plan exchanges once: no other rank has a problem, all have these weights."""
        spans = [[(s.start, s.stop) for s in self.workload.spans(rank)] for rank in range(self.size)]
        others = [replace(value, problem=None, payload=theirs) for theirs in spans]
        return [value if rank == self.rank else reply for rank, reply in enumerate(others)]

    def all_reduce_max(self, tensor: Tensor, what: str = "") -> None:
        """Nothing: the amaxes stay this rank's."""
