"""MasterViews: masters behind cast weights, for `zerocast.verify` and `zerocast.metrics`.

An optimizer, a plan or a host provides them by one method, `master_views()`: one for each group
that masters are sharded over, or for each part of a model whose bytes exist at the same time. The
attribute `master_owner` of a parameter names the object that has this method.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zerocast.distributed.group import Group
from zerocast.formats.layout import Span
from zerocast.weight import QuantizedWeight


@dataclass(frozen=True)
class MasterView:
    """A weight and the flat master of the elements owned here, `span` of the row-major weight.

    Attributes:
        name: None if the owner knows no names.
        weight: the weight with the live bytes.
        scale: f32[1], the scale of the last cast, for delayed scaling only.
        slices: the ranks of all slices of a weight that tensor parallelism cuts; they share the
            tensor amax.
    """

    name: str | None
    weight: QuantizedWeight
    master: Tensor | None
    span: Span
    scale: Tensor | None = None
    slices: Group | None = None


@dataclass(frozen=True)
class MasterViews:
    """The masters of some weights, in the same order on every rank of `group`. Spans of the ranks
    do not overlap.

    Attributes:
        left_out: names of weights that are not included, because some of their elements have no
            master on any rank.
        transient: True if the bytes were gathered for this call only; a step gathers into other
            memory.
    """

    group: Group
    masters: tuple[MasterView, ...]
    left_out: tuple[str, ...] = ()
    transient: bool = False


class OwnsMasters(Protocol):
    """An object that `zerocast.verify` accepts besides a model."""

    def master_views(self) -> Iterable[MasterViews]:
        """Yield the present masters. All ranks iterate together; each item is valid until the
        next.
        """
        ...


def owners_of(what: Any) -> tuple[list[OwnsMasters], dict[int, str], tuple[str, ...]]:
    """(owners, names of weights by the id of their state, quantized weights without an owner).

    `what` is an owner, a model whose weights have owners, or a model or optimizer under
    `zerocast.fsdp2`.
    """
    if hasattr(what, "master_views"):
        return [what], {}, ()
    owners: dict[int, OwnsMasters] = {}
    names, without = {}, []
    for name, parameter in _parameters(what):
        held = getattr(parameter, "_local_tensor", parameter)  # the local shard of a DTensor
        if not hasattr(held, "master_owner"):
            continue
        names[id(getattr(held, "state", None))] = name
        owner = held.master_owner
        if owner is None:
            without.append(name)
        else:
            owners[id(owner)] = owner
    return list(owners.values()), names, tuple(without)


def _parameters(what: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(what, torch.nn.Module):
        yield from what.named_parameters()
    elif isinstance(what, torch.optim.Optimizer):
        for group in what.param_groups:
            yield from (("", parameter) for parameter in group["params"])
