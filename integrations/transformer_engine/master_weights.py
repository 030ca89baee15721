"""TransformerEngine's calls on weights: quantize_master_weights casts master shards, and
replace_raw_data moves the rowwise codes of a tensor into the caller's storage. masters_of gives
`zerocast.verify` and metrics the masters of the last cast.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.distributed.agreement import check_same_call, validate_across_ranks
from zerocast.distributed.group import Group, GroupLike
from zerocast.formats import Columnwise
from zerocast.verification.master_views import MasterView, MasterViews

from .adapters import adapter_of, is_quantized, quantizer_of
from .entry import Entry, directions, entries_of, is_hybrid, parts_of
from .plan_cache import CachedPlan, forget_plans, plans_of
from .transposes import forget_copies
from .weight_view import WeightView, forget_view, view_of

_CALL = "calls quantize_master_weights"


@torch.no_grad()
def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: GroupLike,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Cast master shards into TransformerEngine's tensors, in place.

    One all-reduce serves all formats.

    Args:
        model_weights: tensors of TransformerEngine, the same list on every rank; formats and FP8
            dtypes may differ.
        master_weights: for each, the flat contiguous master of the elements owned here, FP32 or the
            nominal dtype; None or an empty tensor where this rank owns nothing.
        start_offsets: for each, the row-major position of the master's first element. Any position
            will do, an odd one for NVFP4 too.
        group: the ranks that share the masters; None for the default group, or one process.
        fsdp_shard_model_weights: for each, storage for the owned codes only; a (rowwise,
            columnwise) pair for MXFP8.
        manual_post_all_gather_processing: False drops columnwise copies, and the next forward pass
            makes them; True leaves that to `post_all_gather_processing`.

    The first call with a list builds a plan, which is collective beyond the all-reduce: an error on
    one rank is a TypeError, ValueError or RuntimeError on all, with nothing written. An error in a
    later call, also for other elements on this rank than before (`release` the weights on all ranks
    first), is raised on all ranks too; on a GPU the others raise it in their next call. The amax of
    delayed scaling becomes the maximum of itself and the amax of this cast. Its history is not
    changed, since TransformerEngine rolls it.
    """
    if not model_weights and not master_weights:
        return
    members = Group.of(group)
    check_same_call(members, _CALL)
    given = model_weights, master_weights, start_offsets
    # The fast path of every step but the first: all objects and addresses are as in the last call.
    unchanged: CachedPlan | None = None
    if model_weights and is_quantized(model_weights[0]) and fsdp_shard_model_weights is None:
        unchanged = next((cached for cached in plans_of(model_weights) if cached.matches(*given, members)), None)
    if unchanged is not None:
        if not manual_post_all_gather_processing:
            _drop_copies(unchanged.parts(model_weights))
        unchanged.cast_again()
        return
    cached, entries = _prepare(members, model_weights, master_weights, start_offsets, fsdp_shard_model_weights)
    for weight in model_weights:
        # TransformerEngine stores the values before quantization for the creation of the masters,
        # which exist now.
        if hasattr(weight, "clear_high_precision_init_val"):
            weight.clear_high_precision_init_val()
    if not manual_post_all_gather_processing:
        _drop_copies([(entry.tensor, entry.view) for entry in entries])
    cached.cast(entries)
    if fsdp_shard_model_weights is None:
        cached.remember(entries, *given)


cast_master_weights_to_fp8 = quantize_master_weights
"""The older name of `quantize_master_weights`."""


def release(model_weights: Sequence[Any]) -> None:
    """Drop the plans and views that are cached between calls, and so the references to masters.

    Call it on all ranks when masters are sharded differently, or when an optimizer is deleted
    before its model. The next call with these weights builds a new plan.
    """
    for weight in model_weights:
        forget_plans(weight)
        for part in parts_of(weight):
            forget_view(part)
    forget_copies()


def _drop_copies(parts: Sequence[tuple[Any, WeightView]]) -> None:
    """Drop the columnwise copies of the last cast, in the tensors and in the views."""
    for tensor, view in parts:
        view.adapter.outdate(tensor)
    had_copy = [view.forget_columnwise() for _, view in parts]
    if any(had_copy):
        forget_copies()


def _prepare(members: Group, model_weights: Sequence[Any], *lists: Any) -> tuple[CachedPlan, list[Entry]]:
    """Return the plan of these weights, and the entries that this call casts.

    Only a new list, which is new on all ranks, is validated across ranks: a later call costs no
    collective but the all-reduce.
    """
    entries, problem = [], None
    try:
        entries = entries_of(model_weights, *lists)
    except Exception as error:  # of any class: the other ranks wait for this one
        problem = error
        # The other ranks are most likely in the cast of the newest plan.
        for known in plans_of(model_weights)[-1:] if model_weights else ():
            known.refuse(error)
    cached: CachedPlan | None = None
    if problem is None:
        views = [entry.view for entry in entries]
        cached = next((known for known in plans_of(model_weights) if known.is_of(views, members)), None)
    changed = None if cached is None else cached.changed(entries)
    if cached is not None and changed is not None and members.size > 1:
        cached.refuse(
            RuntimeError(
                f"this rank owns different elements of {entries[changed].view.weight!r} than at the first call: call "
                "release(model_weights) on all ranks, and then this"
            )
        )
    if cached is None or changed is not None:
        if cached is not None:
            forget_plans(model_weights[0])
        validate_across_ranks(members, [], problem, what=_CALL)
        cached = CachedPlan(entries, members)
        plans_of(model_weights).append(cached)
    return cached, entries


@torch.no_grad()
def replace_raw_data(tensor: Any, new_raw_data: Tensor) -> None:
    """Copy a tensor's rowwise codes into `new_raw_data`, which becomes the tensor's buffer.

    `new_raw_data` may be a part of a flat buffer. Of a Hybrid tensor the rowwise direction is
    moved. MXFP8 in tiles of 32x32 gets the same storage for its columnwise codes. Raises TypeError
    for anything but a tensor of TransformerEngine, ValueError for storage of a wrong dtype, shape
    or device, NotImplementedError for MXFP8 in blocks of 1x32, whose columnwise codes are separate
    and would not move.
    """
    if is_hybrid(tensor):
        rowwise = dict(directions(tensor)).get("rowwise")
        if rowwise is None:
            raise NotImplementedError("the Hybrid tensor has no rowwise direction: no raw data to replace")
        replace_raw_data(rowwise, new_raw_data)
        return
    quantizer = quantizer_of(tensor)
    adapter = adapter_of(quantizer)
    fmt = adapter.format(quantizer)
    if fmt.casts_columnwise:
        raise NotImplementedError(
            f"a {type(tensor).__name__} has codes by rows and by columns, and one buffer cannot hold both"
        )
    attribute = adapter.of_tensor["rowwise_data"]
    old = getattr(tensor, attribute)
    if old is None:
        raise ValueError(f"the {type(tensor).__name__} has no {attribute}: no raw data to replace")
    given, needed = [(t.dtype, tuple(t.shape), t.device) for t in (new_raw_data, old)]
    if given != needed:
        raise ValueError("the new raw data is {} {} on {}, {} {} on {} is needed".format(*given, *needed))
    new_raw_data.detach().copy_(old)
    setattr(tensor, attribute, new_raw_data)
    if fmt.columnwise is Columnwise.SHARED:
        setattr(tensor, adapter.of_tensor["columnwise_data"], new_raw_data)


class MastersOf:
    """The result of `masters_of`. `master_views` reads the tensors' current buffers."""

    def __init__(self, model_weights: Sequence[Any], group: Group) -> None:
        self._model_weights = list(model_weights)
        self._group = group

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
