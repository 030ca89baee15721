"""CastMeter: counts the effects of the last cast on every quantized weight, such as saturated,
flushed and unchanged elements.

A rank reads only its own elements. One all-gather of eight numbers per weight makes the sums known
to all ranks. Nothing runs between two measurements. To count codes that have not changed since the
last one, a rank keeps a copy of the codes that it owns: 1 byte per element of its shard, half a
byte for nvfp4. Under FSDP2 a measurement gathers one group of parameters after another.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from zerocast.backends.reference.codec import decode
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.group import Group
from zerocast.formats import Element
from zerocast.formats.layout import Span
from zerocast.metrics.owned_part import OwnedPart, overshoot
from zerocast.verification.master_views import MasterViews, owners_of


@dataclass(frozen=True)
class CastCounts:
    """Counts over masters m and their decoded values y. They are sums, so parts can be added up.

    Attributes:
        elements: the number of masters.
        nonfinite: masters that are NaN or Inf.
        saturated: masters above the largest value of their block by more than half of its last
            step, so clipped and not rounded.
        flushed: nonzero masters that decode to zero.
        unchanged: elements with the same code as at the previous measurement.
        square_error: sum of (y - m)**2 over finite masters.
        square_sum: sum of m**2 over finite masters.
        amax: the largest |m|; NaN is ignored.
    """

    elements: int = 0
    nonfinite: int = 0
    saturated: int = 0
    flushed: int = 0
    unchanged: int = 0
    square_error: float = 0.0
    square_sum: float = 0.0
    amax: float = 0.0

    @staticmethod
    def of_row(row: list[float]) -> "CastCounts":
        """Return the counts from a row of f64 numbers, of which the first five are integers."""
        return CastCounts(*map(int, row[:5]), *row[5:])

    @staticmethod
    def together(parts: Iterable["CastCounts"]) -> "CastCounts":
        """Return the counts of all parts together. Floating-point sums are in the order of the
        parts.
        """
        columns = list(zip(*map(astuple, parts), strict=True))
        if not columns:
            return CastCounts()
        # The amax is the last field, and the only one that is not a sum.
        *sums, amaxes = columns
        values = [*map(sum, sums), max(amaxes)]
        return CastCounts(*values)

    @property
    def cast_error(self) -> float:
        """The relative error of the cast, sqrt(sum (y - m)**2 / sum m**2)."""
        return math.sqrt(self.square_error / self.square_sum) if self.square_sum else 0.0

    def scalars(self) -> dict[str, float]:
        """Return the numbers to log: shares in percent, the relative error, the amax and the number
        of masters that are not finite.
        """
        share = 100.0 / max(self.elements, 1)
        return {
            "saturated_percent": share * self.saturated,
            "flushed_percent": share * self.flushed,
            "unchanged_percent": share * self.unchanged,
            "cast_error": self.cast_error,
            "amax": self.amax,
            "nonfinite": self.nonfinite,
        }


FIELDS = len(CastCounts.__dataclass_fields__)
# Buffers that an all-gather of the weights may write to.
GATHERED = ("rowwise_data", "columnwise_data", "rowwise_scale_inv", "columnwise_scale_inv")


class CastMeter:
    """Counts over the quantized weights of an owner of masters, as `zerocast.verify` accepts it.

    All ranks of the owner's group construct a meter and call `measure` together. Weights of format
    `identity` have no codes and are left out.

    Attributes:
        gathered_into: the buffers that a gather of the weights may write to; None under FSDP2,
            where a step gathers into temporary memory.
        device: the device of the weights.

    Raises TypeError for an object that owns no masters.
    """

    def __init__(self, owner: Any) -> None:
        self._owners, _, _ = owners_of(owner)
        # Copies of the owned codes at the last measurement, by the name of the weight.
        self._before: dict[str, Tensor] = {}
        self.device = torch.device("cpu")
        # True if any weight is gathered for a measurement only, as under FSDP2.
        self._transient = False
        # The buffers of all other weights, refreshed by each walk over the sources.
        self._buffers: list[dict[str, Tensor | None]] = []
        numbers = itertools.count()
        for source in self._sources():
            self._before |= {name: part.data().clone() for name, part in _parts(source, numbers).items()}
            self.device = next((owned.weight.device for owned in source.masters), self.device)
        if not self._owners:
            raise TypeError(f"a meter expects a model or an optimizer that owns masters, got {type(owner).__name__}")

    @property
    def gathered_into(self) -> list[Tensor] | None:
        """The current buffers of the weights."""
        if self._transient:
            return None
        # Not through the properties of a weight, which wait for gathers: these are to be measured.
        tensors = [buffers[name] for buffers in self._buffers for name in GATHERED]
        return [tensor for tensor in tensors if tensor is not None]

    def _sources(self) -> Iterator[MasterViews]:
        """Yield the masters of all owners. Collective, and each item is valid until the next."""
        self._buffers = []
        for owner in self._owners:
            for source in owner.master_views():
                # Ranks exchange numbers together below, so a problem of one is raised on all.
                validate_across_ranks(source.group, [], source.problem, "reads masters for a meter")
                self._transient |= source.transient
                if not source.transient:
                    self._buffers += [owned.weight.state.buffers for owned in source.masters]
                yield source

    @torch.no_grad()
    def measure(self) -> dict[str, CastCounts]:
        """Return the counts by weight name over all ranks, the same on every rank.

        Waits for the device and for gathers in flight.
        """
        counts: dict[str, CastCounts] = {}
        numbers = itertools.count()
        for source in self._sources():
            for group, parts in _by_group(source, numbers):
                counts |= self._measure(group, parts)
        return counts

    def _measure(self, group: Group, parts: dict[str, OwnedPart]) -> dict[str, CastCounts]:
        """Return the counts by weight name over the ranks of `group`."""
        own_counts = torch.stack([_count(part, self._codes_before(name, part)) for name, part in parts.items()])
        # Not an all-reduce: every rank adds in rank order, so all ranks have the same sums.
        gathered = own_counts.new_empty(group.size, *own_counts.shape)
        group.all_gather_into(gathered.view(-1), own_counts.view(-1), what="the counts of a meter")
        for name, part in parts.items():
            self._before[name].copy_(part.data())
        by_rank = [[CastCounts.of_row(row) for row in rows] for rows in gathered.tolist()]
        by_weight = zip(*by_rank, strict=True)
        return {name: CastCounts.together(ranks) for name, ranks in zip(parts, by_weight, strict=True)}

    def _codes_before(self, name: str, part: OwnedPart) -> Tensor:
        """Return the codes at the last measurement. For a weight that is new, or whose format has
        changed, they are made to differ from the current codes everywhere.
        """
        codes, before = part.data(), self._before.get(name)
        if before is None or before.shape != codes.shape:
            self._before[name] = codes.bitwise_not()
        return self._before[name]


def _parts(source: MasterViews, numbers: Iterator[int]) -> dict[str, OwnedPart]:
    """Return the quantized weights keyed by name, or by the next of `numbers` if the owner knows no
    names.
    """
    quantized = [owned for owned in source.masters if owned.weight.format.element is not None]
    return {owned.name or str(next(numbers)): OwnedPart(owned) for owned in quantized}


def _by_group(source: MasterViews, numbers: Iterator[int]) -> Iterator[tuple[Group, dict[str, OwnedPart]]]:
    """Yield (group, weights keyed by name): the counts of these weights add up over this group.

    Slices of a weight under tensor parallelism add up over the ranks of all its slices.
    """
    parts = _parts(source, numbers)
    unsliced = {name: part for name, part in parts.items() if part.owned.slices is None}
    if unsliced:
        yield source.group, unsliced
    sliced = {name: part for name, part in parts.items() if part.owned.slices is not None}
    groups = [part.owned.slices for part in sliced.values() if part.owned.slices is not None]
    if groups:
        yield groups[0], sliced


def _count(part: OwnedPart, before: Tensor) -> Tensor:
    """Return the `CastCounts` of one weight's owned elements, as f64[FIELDS] on the device."""
    total = torch.zeros(FIELDS, dtype=torch.float64, device=before.device)
    data = part.data()
    for piece in part.pieces():
        counts = _count_piece(part, piece, data, before)
        # The last field, the amax, is a maximum and no sum.
        amax = torch.maximum(total[-1], counts[-1])
        total += counts
        total[-1] = amax
    return total


def _count_piece(part: OwnedPart, piece: Span, data: Tensor, before: Tensor) -> Tensor:
    """Return the `CastCounts` of a piece, in the order of its fields, as f64[FIELDS] on the
    device.
    """
    unchanged = part.codes(piece, data) == part.codes(piece, before)
    return count(part.element, part.master(piece), part.values(piece), part.codes(piece, data), unchanged)


def count(element: Element, master: Tensor, value: Tensor, code: Tensor, unchanged: Tensor) -> Tensor:
    """Return the `CastCounts` of masters f32, their decoded values f32, their codes u8, one per
    byte, and which of these have not changed. f64[FIELDS] on the device, in the order of the
    fields.
    """
    magnitude, finite = master.abs(), master.isfinite()
    # A saturated element has the largest code. An element that was merely rounded down to it has
    # this code too, but is within half a step of the value.
    has_largest_code = decode(element, code).abs() == element.max
    is_beyond = (magnitude > value.abs() * overshoot(element)) & (value != 0)
    error = torch.where(finite, value - master, 0.0)
    finite_master = torch.where(finite, master, 0.0)
    counts = [
        torch.full((), master.numel(), device=master.device),
        (~finite).sum(),
        (has_largest_code & is_beyond).sum(),
        ((magnitude > 0) & (value == 0)).sum(),
        unchanged.sum(),
        error.double().square().sum(),
        finite_master.double().square().sum(),
        torch.where(master.isnan(), 0.0, magnitude).max(),
    ]
    return torch.stack([number.double() for number in counts])
