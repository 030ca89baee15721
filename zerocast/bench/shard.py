"""Shard: the tensors of a workload in one format, and what zerocast makes of them: a plan, and the stages one by one."""

from itertools import chain

import torch
from torch import Tensor

from zerocast.bench.job import Place
from zerocast.bench.seat import Seat
from zerocast.bench.traffic import NOMINAL
from zerocast.bench.workload import Workload
from zerocast.cast.flat_buffer import into_flat_buffer
from zerocast.cast.partition import MasterShard
from zerocast.cast.plan import CastPlan
from zerocast.cast.weight_table import WeightTable, WeightTables
from zerocast.formats.layout import BUFFERS
from zerocast.weight import QuantizedWeight

STANDARD_DEVIATION = 0.02  # of the masters, about that of a trained weight


class Shard:
    """Weights full of random bytes and random masters of the owned spans, on `place.device`.

    Flat: `flat` holds all masters and every kind of weight buffer lies in one flat buffer. Scattered: each weight has its own.
    """

    def __init__(self, workload: Workload, fmt: str, place: Place) -> None:
        random = place.generator()
        self.spans = list(workload.spans(workload.rank))
        self.weights = [QuantizedWeight.empty(shape, fmt, NOMINAL, place.device) for shape in workload.shapes]
        if workload.flat:
            for name in BUFFERS:
                into_flat_buffer([weight for weight in self.weights if weight.state.buffers[name] is not None], name)
        for tensor in self.written():
            _fill(tensor, random)
        self.flat = torch.empty(workload.owned, device=place.device).normal_(0, STANDARD_DEVIATION, generator=random)
        parts = self.flat.split([span.numel for span in self.spans])
        self.masters = [part if workload.flat else part.clone() for part in parts]
        starts = [span.start for span in self.spans]
        self.plan = CastPlan(self.weights, self.masters, starts, Seat.at(workload), backend=place.backend)

    @property
    def packed(self) -> Tensor:
        """The buffer of all amaxes."""
        return self.plan.packed.buffer

    def written(self) -> list[Tensor]:
        """Every buffer of every weight."""
        buffers = chain.from_iterable(weight.state.buffers.values() for weight in self.weights)
        return [buffer for buffer in buffers if buffer is not None]

    def table(self) -> WeightTable:
        """The stages of the plan's cast, to be called one by one."""
        tables = WeightTables(self.flat.device, self.plan.backend)
        for index, (weight, master, span) in enumerate(zip(self.weights, self.masters, self.spans, strict=True)):
            owned = master if span.numel else None
            tables.of(weight).add_shard(MasterShard(weight, owned, span), self.plan.packed.offsets[index])
        (table,) = tables.freeze()
        return table


def _fill(tensor: Tensor, random: torch.Generator) -> None:
    """Bytes of any value, floats of a harmless one: a kernel that leaves them shows."""
    if tensor.dtype is torch.uint8:
        tensor.random_(0, 256, generator=random)
    else:
        tensor.uniform_(0.5, 1.0, generator=random)
