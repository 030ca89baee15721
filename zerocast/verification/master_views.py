"""MasterViews: the masters behind cast weights, as whoever owns them shows them to `zerocast.verify` and `zerocast.metrics`.

An optimizer, a plan or a host offers it by one method, `master_views()`: a source for each group that masters are sharded over,
or for each part of a model whose bytes are there together. A parameter says who that is by `master_owner`.
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
class MasterViews:
    """The masters of some weights, in the same order on every rank of `group`. Spans of the ranks do not overlap.

    `left_out` names weights that are not shown, since no rank has a master of them, or none of some of their elements. The bytes of
    `transient` ones are there for this look alone: a step gathers into other memory.
    """

    group: Group
    masters: tuple[MasterView, ...]
    left_out: tuple[str, ...] = ()
    transient: bool = False


class OwnsMasters(Protocol):
    """What `zerocast.verify` takes, besides a model."""

    def master_views(self) -> Iterable[MasterViews]:
        """The masters as they are now. All ranks ask for the sources one by one; each holds until the next is asked for."""
        ...


def owners_of(what: Any) -> tuple[list[OwnsMasters], dict[int, str], tuple[str, ...]]:
    """(owners, names of weights by their state, quantized weights whose masters nobody here owns).

    `what` is an owner, a model whose weights were given to one, or a model or an optimizer under `zerocast.fsdp2`.
    """
    if hasattr(what, "master_views"):
        return [what], {}, ()
    owners: dict[int, OwnsMasters] = {}
    names, without = {}, []
    for name, parameter in _parameters(what):
        held = getattr(parameter, "_local_tensor", parameter)  # that of a DTensor
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
