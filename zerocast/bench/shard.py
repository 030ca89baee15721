"""One rank's share of a workload: its tensors, the plan over them, and the stages.

A SimulatedGroup replaces the other ranks, so that one device does exactly one rank's share of a
cast.
"""

import math
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from zerocast.bench.traffic import NOMINAL
from zerocast.bench.workload import BenchEnv, Workload
from zerocast.cast.partition import MasterShard
from zerocast.cast.plan import CastPlan
from zerocast.cast.tables import WeightTable, WeightTables
from zerocast.distributed.group import Group
from zerocast.distributed.ownership import whole_sums
from zerocast.formats.layout import BUFFERS, elements_per_scale
from zerocast.weight import QuantizedWeight
from zerocast.weight.buffers import into_flat_buffer


@dataclass(frozen=True)
class SimulatedGroup(Group):
    """A group whose other members are simulated: same weights, the other shards.

    A plan in it has amaxes and scales for every weight, as on a cluster. Collectives move nothing:
    their time belongs to the network and is not measured here.
    """

    workload: Workload

    @staticmethod
    def of_workload(workload: Workload) -> "SimulatedGroup":
        """Return the group of the workload's rank."""
        return SimulatedGroup(None, workload.rank, workload.world, workload)

    def all_reduce_sum(self, tensor: Tensor, what: str = "") -> None:
        """Fill in the sums over all ranks, which are known: when a plan is built, ranks add up the
        elements that they own, and together they own each element once.
        """
        tensor.copy_(whole_sums([math.prod(shape) for shape in self.workload.shapes]))

    def all_reduce_max(self, tensor: Tensor, what: str = "", async_op: bool = False) -> None:
        """Do nothing. When a plan is built all ranks have the same values; in a cast the amaxes of
        this rank are used.
        """


# The standard deviation of the masters, about the same as of a trained weight.
STANDARD_DEVIATION = 0.02


class Shard:
    """Weights of random bytes, and random masters of the owned spans, on `env.device`.

    A flat workload has all masters in `flat` and each kind of weight buffer in one tensor. A
    scattered one has separate tensors for each weight. With `gathers_scales` the plan only makes
    the scales of the owned elements, if the format allows it.
    """

    def __init__(self, workload: Workload, fmt: str, env: BenchEnv, gathers_scales: bool = False) -> None:
        random = env.generator()
        self.spans = list(workload.spans(workload.rank))
        self.weights = [QuantizedWeight.empty(shape, fmt, NOMINAL, env.device) for shape in workload.shapes]
        if workload.flat:
            for name in BUFFERS:
                into_flat_buffer([weight for weight in self.weights if weight.state.buffers[name] is not None], name)
        for tensor in self.written():
            _fill(tensor, random)
        self.flat = torch.empty(workload.owned, device=env.device).normal_(0, STANDARD_DEVIATION, generator=random)
        masters = self.flat.split([span.numel for span in self.spans])
        self.masters = [master if workload.flat else master.clone() for master in masters]
        starts = [span.start for span in self.spans]
        cuts = [
            cuts if gathers_scales and elements_per_scale(weight.format, weight.shape) else None
            for weight, cuts in zip(self.weights, workload.cuts(), strict=True)
        ]
        group = SimulatedGroup.of_workload(workload)
        self.plan = CastPlan(self.weights, self.masters, starts, group, backend=env.backend, scale_cuts=cuts)

    @property
    def packed(self) -> Tensor:
        """The packed buffer of all amaxes."""
        return self.plan.amaxes.buffer

    def written(self) -> list[Tensor]:
        """Return all buffers of all weights, in a fixed order."""
        buffers = chain.from_iterable(weight.state.buffers.values() for weight in self.weights)
        return [buffer for buffer in buffers if buffer is not None]

    def table(self) -> WeightTable:
        """Return the plan's weights as a table, to run the stages of a cast one at a time."""
        tables = WeightTables(self.flat.device, self.plan.backend)
        for index, (weight, master, span) in enumerate(zip(self.weights, self.masters, self.spans, strict=True)):
            shard = MasterShard(weight, master if span.numel else None, span)
            tables.of(weight).add_shard(shard, self.plan.amaxes.offsets[index])
        (table,) = tables.freeze()
        return table


def _fill(tensor: Tensor, random: torch.Generator) -> None:
    """Fill a tensor with random bytes, or with floats between 0.5 and 1. A kernel that omits an
    element then writes different bytes than the reference.
    """
    if tensor.dtype is torch.uint8:
        tensor.random_(0, 256, generator=random)
    else:
        tensor.uniform_(0.5, 1.0, generator=random)
