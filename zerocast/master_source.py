"""MasterSource: the masters behind cast weights, as whoever owns them shows them to `zerocast.verify` and `zerocast.metrics`.

An optimizer, a plan or a host offers it by one method, `master_source()`. What owns masters over several groups, or not at all as a
span of a weight, is left out until something needs it.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from zerocast.group import Group
from zerocast.layout import Span
from zerocast.weight import QuantizedWeight


@dataclass(frozen=True)
class OwnedMaster:
    """One weight with the flat master of the elements that this rank owns, `span` of the row-major weight.

    `weight` holds the live bytes. `scale`, f32[1], is what they were cast with; delayed scaling only.
    """

    name: str
    weight: QuantizedWeight
    master: Tensor | None
    span: Span
    scale: Tensor | None = None


@dataclass(frozen=True)
class MasterSource:
    """The masters of some weights, in the same order on every rank of `group`. Spans of the ranks do not overlap."""

    group: Group
    masters: tuple[OwnedMaster, ...]


class OwnsMasters(Protocol):
    """What `zerocast.verify` takes, besides a model."""

    def master_source(self) -> MasterSource:
        """The masters as they are now; this call does not communicate."""
        ...
