"""Seat: one rank of many without the others, so that one device does exactly one rank's share of a cast."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zerocast.bench.workload import Workload
from zerocast.group import Group


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

    def all_gather_object(self, value: Any) -> list[Any]:
        """What a plan exchanges once (`zerocast.agreement.agree`): no other rank has a problem, all have these weights."""
        problem, digest, _ = value
        spans = [[(s.start, s.stop) for s in self.workload.spans(rank)] for rank in range(self.size)]
        return [(problem if rank == self.rank else None, digest, theirs) for rank, theirs in enumerate(spans)]

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Nothing: the amaxes stay this rank's."""
