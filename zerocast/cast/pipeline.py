"""The pipeline: partial amaxes, packed, all-reduced once, scales, partial cast. All weights and formats together."""

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from zerocast.cast.adam_update import AdamUpdate
from zerocast.cast.delayed_scaling import DelayedScaling
from zerocast.cast.packed_amax import PackedAmax
from zerocast.cast.weight_table import WeightTable
from zerocast.distributed.group import Group


@torch.no_grad()
def cast(
    batches: Sequence[WeightTable],
    neighbours: Sequence[WeightTable],
    packed: PackedAmax,
    received: Tensor,
    group: Group,
    delayed: DelayedScaling,
    *,
    skip: Tensor | None = None,
    update: AdamUpdate | None = None,
    repeat: bool = False,
) -> None:
    """Cast the owned masters of `batches` into their weights, as they are or, with `update`, as it makes them.

    `neighbours` writes the elements beside odd cuts, which arrive with the amaxes in f32 `received`. Where `skip`, bool[1], holds
    True nothing is written; the collective runs all the same, since `skip` is on the device.
    """
    packed.reset()
    for batch in batches:
        if update is None:
            batch.partial_amax(packed.buffer)
        else:
            batch.adam_amax(update, packed.buffer, skip)
    packed.put_kept()
    packed.put_shared(group.rank)

    packed.all_reduce(group)

    if neighbours:
        packed.received(received)
    encode(batches, packed.buffer, delayed, skip=skip, repeat=repeat, neighbours=neighbours)


@torch.no_grad()
def encode(
    batches: Sequence[WeightTable],
    packed: Tensor,
    delayed: DelayedScaling,
    *,
    skip: Tensor | None = None,
    repeat: bool = False,
    neighbours: Sequence[WeightTable] = (),
) -> None:
    """Write scales and codes by the reduced amaxes in `packed`. `delayed` has the weights of `batches` that scale by their past.

    It moves on by one cast. With `repeat` this is the last cast once more: by its scales, and histories do not roll.
    """
    if delayed.unseeded and skip is None:
        for batch in batches:
            batch.compute_scales(packed, None)  # which writes the amaxes that are rolled
        delayed.seed(lambda: _roll(batches, None))
    if not repeat:
        delayed.advance(skip)
    with delayed.replay() if repeat and delayed else contextlib.nullcontext():
        for batch in batches:
            batch.compute_scales(packed, skip)
        for batch in (*batches, *neighbours):
            batch.partial_cast(packed, skip)
    if not repeat:
        _roll(batches, skip)


def _roll(batches: Sequence[WeightTable], skip: Tensor | None) -> None:
    for batch in batches:
        batch.roll_history(skip)
