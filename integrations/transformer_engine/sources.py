"""masters_of: the masters behind TransformerEngine's tensors, for `zerocast.verify` and metrics."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.group import Group, GroupLike
from zerocast.verification.master_views import MasterView, MasterViews

from .entry import directions, is_hybrid, parts_of
from .plan_cache import CachedPlan, plans_of
from .weight_view import WeightView, view_of


class MastersOf:
    """The result of `masters_of`. `master_views` reads the tensors' current buffers."""

    def __init__(self, model_weights: Sequence[Any], group: Group) -> None:
        self._model_weights, self._group = list(model_weights), group

    def master_views(self) -> Iterator[MasterViews]:
        """Yield the masters of the last call with these weights. Collective.

        Weights whose codes are in transposes only are in a second, transient MasterViews.

        An error on one rank raises on all: ValueError for weights that were not cast as this list,
        TypeError, ValueError or RuntimeError for tensors on which a cast would raise.
        """
        sources: list[MasterViews] = []
        problem = None
        try:
            sources = self._sources()
        except Exception as error:  # of any class: the other ranks wait for this one
            problem = error
        lines = [_line(owned) for source in sources for owned in source.masters]
        validate_across_ranks(self._group, lines, problem, what="verifies")
        yield from sources

    def _sources(self) -> list[MasterViews]:
        named = [part for index, weight in enumerate(self._model_weights) for part in _named(index, weight)]
        # The plan has the masters. Its weights are views of the buffers of the last call, so each
        # is replaced by a view of the current buffers.
        cached = self._cached([view for _, _, view in named])
        cast = cached.master_views()
        cast.check()
        by_state = {id(owned.weight.state): owned for owned in cast.masters}
        in_place: list[MasterView] = []
        copied: list[MasterView] = []
        left_out = []
        for name, tensor, view in named:
            owned = by_state.get(id(view.weight.state))
            if owned is None:
                left_out.append(name)
            else:
                views = copied if view.codes_in_transpose else in_place
                views.append(dataclasses.replace(owned, name=name, weight=view.live(tensor)))
        sources = [MasterViews(self._group, tuple(in_place), tuple(left_out))]
        if copied:
            sources.append(MasterViews(self._group, tuple(copied), transient=True))
        return sources

    def _cached(self, views: list[WeightView]) -> CachedPlan:
        plans = plans_of(self._model_weights) if self._model_weights else ()
        cached = next((cached for cached in plans if cached.is_of(views, self._group)), None)
        if cached is None:
            raise ValueError(
                f"no masters are known of these {len(self._model_weights)} weights: pass the list, in its order, and the group "
                "that quantize_master_weights was last called with"
            )
        return cached


def masters_of(model_weights: Sequence[Any], group: GroupLike = None) -> MastersOf:
    """Give `zerocast.verify` and `zerocast.metrics.Meter` the masters of a list of weights.

    It is the list that `quantize_master_weights` was called with.

        zerocast.verify(masters_of(model_weights, group)).raise_for_differences()

    All ranks of the group call `verify` together, when the codes have been gathered: every byte
    that TransformerEngine's products read is compared with an unsharded cast of the masters of the
    last call, also after masters or buffers moved to a different storage. A columnwise copy that is
    older than the last cast is reported, since TransformerEngine would read it.
    """
    return MastersOf(model_weights, Group.of(group))


def _named(index: int, weight: Any) -> Iterator[tuple[str, Any, WeightView]]:
    names = [f" {name}" for name, _ in directions(weight)] if is_hybrid(weight) else [""]
    for name, part in zip(names, parts_of(weight), strict=True):
        yield f"model weight {index}{name}", part, view_of(part, weight.dtype)


def _line(owned: MasterView) -> str:
    return f"{owned.name}: {owned.weight.format} {tuple(owned.weight.shape)} {owned.weight.dtype}"
