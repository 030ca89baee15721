"""masters_of: the masters behind TransformerEngine's tensors, for `zerocast.verify` and metrics."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.group import Group, GroupLike
from zerocast.verification.master_views import MasterView, MasterViews

from .entry import directions, is_hybrid, parts_of
from .plan_cache import CachedPlan, plans
from .weight_view import WeightView, view_of


class MastersOf:
    """The result of `masters_of`.

    The tensors are looked at anew for every look, wherever their buffers lie by then.
    """

    def __init__(self, model_weights: Sequence[Any], group: Group) -> None:
        self._model_weights, self._group = list(model_weights), group

    def master_views(self) -> Iterator[MasterViews]:
        """The masters of the last call of these weights.

        Codes that lie in transposes alone are views of their own.

        Raises on every rank what is wrong on any: ValueError for weights that were not cast as this
        list, TypeError, ValueError or RuntimeError for tensors that a cast would refuse.
        """
        found: list[MasterViews] = []
        problem = None
        try:
            found = self._sources()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = error
        lines = [_line(owned) for source in found for owned in source.masters]
        validate_across_ranks(self._group, lines, problem, what="verifies")
        yield from found

    def _sources(self) -> list[MasterViews]:
        named = [part for index, weight in enumerate(self._model_weights) for part in _named(index, weight)]
        cached = self._cached([view for _, _, view in named])
        cast = cached.master_views()
        by_state = {id(owned.weight.state): owned for owned in cast.masters}
        in_place: list[MasterView] = []
        copied: list[MasterView] = []
        left_out = []
        for name, tensor, view in named:
            owned = by_state.get(id(view.weight.state))
            if owned is None:
                left_out.append(name)
            else:
                shown = copied if view.codes_in_transpose else in_place
                shown.append(dataclasses.replace(owned, name=name, weight=view.live(tensor)))
        sources = [MasterViews(self._group, tuple(in_place), tuple(left_out))]
        return [*sources, MasterViews(self._group, tuple(copied), transient=True)] if copied else sources

    def _cached(self, views: list[WeightView]) -> CachedPlan:
        cached = plans.find(self._model_weights, views, self._group) if self._model_weights else None
        if cached is None:
            raise ValueError(
                f"no masters are known of these {len(self._model_weights)} weights: pass the list, in its order, and the group "
                "that quantize_master_weights was last called with"
            )
        return cached


def masters_of(model_weights: Sequence[Any], group: GroupLike = None) -> MastersOf:
    """Show the masters of a list of weights, as `quantize_master_weights` was given it, to
    `zerocast.verify` and `zerocast.metrics.Meter`.

        zerocast.verify(masters_of(model_weights, group)).raise_for_differences()

    All ranks of the group call `verify` together, when the codes have been gathered: every byte
    that TransformerEngine's products read is compared with an unsharded cast of the masters of the
    last call, wherever they and the buffers lie by then. A columnwise copy that is there and was
    made before the last cast is reported, for TransformerEngine would read it.
    """
    return MastersOf(model_weights, Group.of(group))


def _named(index: int, weight: Any) -> Iterator[tuple[str, Any, WeightView]]:
    names = [f" {name}" for name, _ in directions(weight)] if is_hybrid(weight) else [""]
    for name, part in zip(names, parts_of(weight), strict=True):
        yield f"model weight {index}{name}", part, view_of(part, weight.dtype)


def _line(owned: MasterView) -> str:
    return f"{owned.name}: {owned.weight.format} {tuple(owned.weight.shape)} {owned.weight.dtype}"
