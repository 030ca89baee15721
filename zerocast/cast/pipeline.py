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
    tables: Sequence[WeightTable],
    boundary: Sequence[WeightTable],
    packed: PackedAmax,
    received: Tensor,
    group: Group,
    delayed: DelayedScaling,
    *,
    skip: Tensor | None = None,
    update: AdamUpdate | None = None,
    repeat: bool = False,
) -> None:
    """Cast the owned masters of `tables` into their weights, as they are or, with `update`, as it makes them.

    `boundary` writes the elements beside odd cuts, which arrive with the amaxes in f32 `received`. Where `skip`, bool[1], holds
    True nothing is written; the collective runs all the same, since `skip` is on the device.
    """
    packed.reset()
    for table in tables:
        if update is None:
            table.partial_amax(packed.buffer)
        else:
            table.adam_amax(update, packed.buffer, skip)
    packed.put_external()
    packed.put_boundary(group.rank)

    packed.all_reduce(group)

    if boundary:
        packed.received(received)
    encode(tables, packed.buffer, delayed, skip=skip, repeat=repeat, boundary=boundary)


@torch.no_grad()
def encode(
    tables: Sequence[WeightTable],
    packed: Tensor,
    delayed: DelayedScaling,
    *,
    skip: Tensor | None = None,
    repeat: bool = False,
    boundary: Sequence[WeightTable] = (),
) -> None:
    """Write scales and codes by the reduced amaxes in `packed`. `delayed` has the weights of `tables` that scale by their past.

    It moves on by one cast. With `repeat` this is the last cast once more: by its scales, and histories do not roll.
    """
    if delayed.unseeded and skip is None:
        for table in tables:
            table.compute_scales(packed, None)  # which writes the amaxes that are rolled
        delayed.seed(lambda: _roll(tables, None))
    if not repeat:
        delayed.advance(skip)
    with delayed.replay() if repeat and delayed else contextlib.nullcontext():
        for table in tables:
            table.compute_scales(packed, skip)
        for table in (*tables, *boundary):
            table.partial_cast(packed, skip)
    if not repeat:
        _roll(tables, skip)


def _roll(tables: Sequence[WeightTable], skip: Tensor | None) -> None:
    for table in tables:
        table.roll_history(skip)
