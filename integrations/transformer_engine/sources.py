"""masters_of: the masters behind TransformerEngine's tensors, as `zerocast.verify` and `zerocast.metrics` see them."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.group import Group, GroupLike
from zerocast.verification.master_views import MasterView, MasterViews

from .entry import parts_of
from .hybrid import directions, is_hybrid
from .kept import Kept, plans
from .twin import Twin, twin_of


class MastersOf:
    """What `masters_of` returns. The tensors are looked at anew for every look, wherever their buffers lie by then."""

    def __init__(self, model_weights: Sequence[Any], group: Group) -> None:
        self._model_weights, self._group = list(model_weights), group

    def master_views(self) -> Iterator[MasterViews]:
        """The masters of the last call of these weights, the codes that lie in transposes alone in a source of their own.

        Raises on every rank what is wrong on any: ValueError for weights that were not cast as this list, TypeError, ValueError or
        RuntimeError for tensors that a cast would refuse.
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
        kept = self._kept([twin for _, _, twin in named])
        cast = kept.master_views()
        by_state = {id(owned.weight.state): owned for owned in cast.masters}
        in_place: list[MasterView] = []
        copied: list[MasterView] = []
        left_out = []
        for name, tensor, twin in named:
            owned = by_state.get(id(twin.weight.state))
            if owned is None:
                left_out.append(name)
            else:
                shown = copied if twin.codes_in_transpose else in_place
                shown.append(dataclasses.replace(owned, name=name, weight=twin.live(tensor)))
        sources = [MasterViews(self._group, tuple(in_place), tuple(left_out))]
        return [*sources, MasterViews(self._group, tuple(copied), transient=True)] if copied else sources

    def _kept(self, twins: list[Twin]) -> Kept:
        kept = plans.find(self._model_weights, twins, self._group) if self._model_weights else None
        if kept is None:
            raise ValueError(
                f"no masters are known of these {len(self._model_weights)} weights: pass the list, in its order, and the group "
                "that quantize_master_weights was last called with"
            )
        return kept


def masters_of(model_weights: Sequence[Any], group: GroupLike = None) -> MastersOf:
    """What `zerocast.verify` and `zerocast.metrics.Meter` take, for a list that `quantize_master_weights` was called with.

        zerocast.verify(masters_of(model_weights, group)).raise_for_differences()

    All ranks of the group call `verify` together, when the codes have been gathered: every byte that TransformerEngine's products
    read is compared with an unsharded cast of the masters of the last call, wherever they and the buffers lie by then. A columnwise
    copy that is there and was made before the last cast is reported, for TransformerEngine would read it.
    """
    return MastersOf(model_weights, Group.of(group))


def _named(index: int, weight: Any) -> Iterator[tuple[str, Any, Twin]]:
    names = [f" {name}" for name, _ in directions(weight)] if is_hybrid(weight) else [""]
    for name, part in zip(names, parts_of(weight), strict=True):
        yield f"model weight {index}{name}", part, twin_of(part, weight.dtype)


def _line(owned: MasterView) -> str:
    return f"{owned.name}: {owned.weight.format} {tuple(owned.weight.shape)} {owned.weight.dtype}"
