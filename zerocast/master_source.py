"""MasterSource: the masters behind cast weights, as whoever owns them shows them to `zerocast.verify` and `zerocast.metrics`.

An optimizer, a plan or a host offers it by one method, `master_sources()`: a source for each group that masters are sharded over,
or for each part of a model whose bytes are there together. A parameter says who that is by `master_owner`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from zerocast.group import Group
from zerocast.layout import Span
from zerocast.weight import QuantizedWeight


@dataclass(frozen=True)
class OwnedMaster:
    """One weight with the flat master of the elements that this rank owns, `span` of the row-major weight.

    `weight` holds the live bytes. `scale`, f32[1], is what they were cast with; delayed scaling only. `name` is None where the
    owner knows none. `slices` are the ranks of all slices of a weight that tensor parallelism cuts: they share the tensor amax.
    """

    name: str | None
    weight: QuantizedWeight
    master: Tensor | None
    span: Span
    scale: Tensor | None = None
    slices: Group | None = None


@dataclass(frozen=True)
class MasterSource:
    """The masters of some weights, in the same order on every rank of `group`. Spans of the ranks do not overlap.

    `left_out` names weights that are not shown, since no rank has a master of them, or none of some of their elements.
    """

    group: Group
    masters: tuple[OwnedMaster, ...]
    left_out: tuple[str, ...] = ()


class OwnsMasters(Protocol):
    """What `zerocast.verify` takes, besides a model."""

    def master_sources(self) -> Iterable[MasterSource]:
        """The masters as they are now. All ranks ask for the sources one by one; each holds until the next is asked for."""
        ...
