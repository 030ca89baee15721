"""MasterViews: the master weights behind cast weights, for `zerocast.verify` and
`zerocast.metrics`.

An optimizer, a plan or a host yields them from one method, `master_views()`. There is one
MasterViews per group over which masters are sharded, or per part of a model whose bytes exist at
the same time. The attribute `master_owner` of a parameter is the object with this method.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from zerocast.distributed.group import Group
from zerocast.formats.layout import Span
from zerocast.weight import QuantizedWeight


@dataclass(frozen=True)
class MasterView:
    """A weight, and the master of its elements that this rank owns.

    Attributes:
        name: the name of the weight; None if the owner knows no names.
        weight: the weight with the live bytes.
        master: the flat master of the owned elements; None if this rank owns none.
        span: the owned elements of the row-major weight.
        scale: f32[1], the scale of the last cast, for delayed scaling only.
        slices: the ranks with the slices of a weight under tensor parallelism, which share its
            tensor amax; None for a weight that is not sliced.
    """

    name: str | None
    weight: QuantizedWeight
    master: Tensor | None
    span: Span
    scale: Tensor | None = None
    slices: Group | None = None

    def matrices(self) -> "list[MasterView]":
        """Return the views of the matrices that the weight is stored in, in their order. Nearly
        always this view only.
        """
        count, (rows, columns) = self.weight.stored_matrices
        if count == 1:
            return [self]
        views = []
        for number, weight in enumerate(self.weight.matrices()):
            begin = number * rows * columns
            own = self.span.intersect(Span(begin, begin + rows * columns))
            master = self.master
            if master is not None:
                master = master[own.start - self.span.start : own.stop - self.span.start]
            span = Span(own.start - begin, own.stop - begin) if own.numel else Span(0, 0)
            name = None if self.name is None else f"{self.name}[{number}]"
            views.append(replace(self, name=name, weight=weight, master=master, span=span))
        return views


@dataclass(frozen=True)
class MasterViews:
    """The masters of some weights, in the same order on every rank of `group`.

    Attributes:
        group: the ranks over which the masters are sharded.
        masters: one view per weight. The spans of the ranks do not overlap.
        left_out: names of weights that are not included, because some of their elements have no
            master on any rank.
        transient: True if the bytes were gathered for this call only, and are freed after it. A
            step then gathers into different storage.
        problem: the error because of which masters and weights must not be read on this rank, such
            as a step that failed partway. Other ranks may have none, so ranks that read together
            raise it together.
    """

    group: Group
    masters: tuple[MasterView, ...]
    left_out: tuple[str, ...] = ()
    transient: bool = False
    problem: Exception | None = None

    def check(self) -> None:
        """Raise the problem of this rank, if there is one."""
        if self.problem is not None:
            raise self.problem


class OwnsMasters(Protocol):
    """An object that `zerocast.verify` accepts besides a model."""

    def master_views(self) -> Iterable[MasterViews]:
        """Yield the current masters. Collective: all ranks iterate together. An item is valid until
        the next one.
        """
        ...


def owners_of(what: Any) -> tuple[list[OwnsMasters], dict[int, str], tuple[str, ...]]:
    """Return (owners, names of weights by the id of their state, quantized weights without an
    owner).

    `what` is an owner, a model whose weights have owners, or a model or optimizer under
    `zerocast.fsdp2`.
    """
    if hasattr(what, "master_views"):
        return [what], {}, ()
    # By id, since several weights have the same owner and owners may not hash.
    owners: dict[int, OwnsMasters] = {}
    names, without = {}, []
    for name, parameter in _parameters(what):
        # Under FSDP2 a parameter is a DTensor. Its local shard has the attribute.
        local = getattr(parameter, "_local_tensor", parameter)
        if not hasattr(local, "master_owner"):
            continue
        names[id(getattr(local, "state", None))] = name
        owner = local.master_owner
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
