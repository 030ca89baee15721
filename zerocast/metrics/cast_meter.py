"""CastMeter: what the last cast did to every quantized weight, from the masters owned here and the bytes that were cast from them.

A rank looks at its own elements only; one all-gather of eight numbers a weight and rank makes the sums known to all. Between
two looks nothing is done at all. To tell which codes have not moved since the last look, a rank keeps a copy of those that it
owns: 1 byte an element of its shard, half of that for nvfp4. Under FSDP2 a look gathers one group of parameters after another.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zerocast.distributed.group import Group
from zerocast.formats import Element
from zerocast.formats.layout import Span
from zerocast.metrics.cast_counts import CastCounts
from zerocast.metrics.owned_part import OwnedPart, largest_code, overshoot
from zerocast.verification.master_views import MasterViews, owners_of

FIELDS = len(CastCounts.__dataclass_fields__)


class CastMeter:
    """Counts over the quantized weights of whoever owns their masters; takes what `zerocast.verify` takes.

    All ranks of the owner's group make one, and `measure` together. `identity` weights have no codes and are left out.

    Attributes:
        gathered_into: what a gather of the weights writes to; None where a step gathers into other memory (FSDP2).
        device: where the weights are.

    Raises TypeError for what owns no masters.
    """

    def __init__(self, owner: Any) -> None:
        self._owners, _, _ = owners_of(owner)
        self._before: dict[str, Tensor] = {}
        self.device = torch.device("cpu")
        self._transient = False
        self._buffers: list[dict[str, Tensor | None]] = []
        for source in self._sources():
            self._before |= {name: part.data().clone() for name, part in _parts(source).items()}
            self.device = next((owned.weight.device for owned in source.masters), self.device)
        if not self._owners:
            raise TypeError(f"a meter takes a model or an optimizer that owns masters, got {type(owner).__name__}")

    @property
    def gathered_into(self) -> list[Tensor] | None:
        """Buffers of the weights where they are now. Nothing is gathered for it, since that is what is measured."""
        if self._transient:
            return None
        held = [buffers[name] for buffers in self._buffers for name in ("rowwise_data", "columnwise_data")]
        return [tensor for tensor in held if tensor is not None]

    def _sources(self) -> Iterator[MasterViews]:
        self._buffers = []
        for owner in self._owners:
            for source in owner.master_views():
                self._transient |= source.transient
                if not source.transient:
                    self._buffers += [owned.weight.state.buffers for owned in source.masters]
                yield source

    @torch.no_grad()
    def measure(self) -> dict[str, CastCounts]:
        """By name of the weight, over all ranks; on all of them alike. Waits for the device, and for gathers in flight."""
        counts: dict[str, CastCounts] = {}
        for source in self._sources():
            for group, parts in _by_group(source):
                counts |= self._measure(group, parts)
        return counts

    def _measure(self, group: Group, parts: dict[str, OwnedPart]) -> dict[str, CastCounts]:
        here = torch.stack([_count(part, self._before[name]) for name, part in parts.items()])
        everywhere = here.new_empty(group.size, *here.shape)
        group.all_gather_into(everywhere.view(-1), here.view(-1), what="what a meter has counted")
        for name, part in parts.items():
            self._before[name].copy_(part.data())
        by_rank = [[_counts(row) for row in rows] for rows in everywhere.tolist()]
        by_weight = zip(*by_rank, strict=True)
        return {name: CastCounts.together(ranks) for name, ranks in zip(parts, by_weight, strict=True)}


def _parts(source: MasterViews) -> dict[str, OwnedPart]:
    """The quantized weights by name, or by number where the owner knows no names."""
    quantized = [owned for owned in source.masters if owned.weight.format.element is not None]
    return {owned.name or str(index): OwnedPart(owned) for index, owned in enumerate(quantized)}


def _by_group(source: MasterViews) -> Iterator[tuple[Group, dict[str, OwnedPart]]]:
    """Who owns elements of which: slices of tensor parallelism add up over the ranks of all slices."""
    parts = _parts(source)
    whole = {name: part for name, part in parts.items() if part.owned.slices is None}
    if whole:
        yield source.group, whole
    sliced = {name: part for name, part in parts.items() if part.owned.slices is not None}
    groups = [part.owned.slices for part in sliced.values() if part.owned.slices is not None]
    if groups:
        yield groups[0], sliced


def _counts(row: list[float]) -> CastCounts:
    return CastCounts(*map(int, row[:5]), *row[5:])


def _count(part: OwnedPart, before: Tensor) -> Tensor:
    """One weight's `CastCounts` of what is owned here, f64[FIELDS] on the device."""
    total = torch.zeros(FIELDS, dtype=torch.float64, device=before.device)
    data = part.data()
    for piece in part.pieces():
        counts = _count_piece(part, piece, data, before)
        amax = torch.maximum(total[-1], counts[-1])
        total += counts
        total[-1] = amax
    return total


def _count_piece(part: OwnedPart, piece: Span, data: Tensor, before: Tensor) -> Tensor:
    master, value, code = part.master(piece), part.values(piece), part.codes(piece, data)
    magnitude, finite = master.abs(), master.isfinite()
    at_top = (code & _magnitude_bits(part.element)) == largest_code(part.element)
    beyond = (magnitude > value.abs() * overshoot(part.element)) & (value != 0)
    error = torch.where(finite, value - master, 0.0)
    finite_master = torch.where(finite, master, 0.0)
    counts = [
        torch.full((), piece.numel, device=master.device),
        (~finite).sum(),
        (at_top & beyond).sum(),
        ((magnitude > 0) & (value == 0)).sum(),
        (code == part.codes(piece, before)).sum(),
        error.double().square().sum(),
        finite_master.double().square().sum(),
        torch.where(master.isnan(), 0.0, magnitude).max(),
    ]
    return torch.stack([count.double() for count in counts])


def _magnitude_bits(element: Element) -> int:
    return (1 << (element.bits - 1)) - 1
