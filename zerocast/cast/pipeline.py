"""The pipeline of a cast: partial amaxes, one reduction, scales, codes. All weights and formats
together.

Hosts differ in what has to be reduced and in nothing else (`zerocast.cast.amaxes`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.cast.adam_update import AdamUpdate
from zerocast.cast.amaxes import PackedAmaxes
from zerocast.cast.delayed_scaling import NOTHING, DelayedScaling
from zerocast.cast.tables import WeightTable


def cast(
    tables: Sequence[WeightTable],
    amaxes: PackedAmaxes[Any],
    delayed: DelayedScaling,
    *,
    unmeasured: Sequence[WeightTable] | None = None,
    codes: Sequence[WeightTable] | None = None,
    boundary: Sequence[WeightTable] = (),
    skip: Tensor | None = None,
    update: AdamUpdate | None = None,
    repeat: bool = False,
) -> None:
    """Cast the owned masters of `tables` into their weights, as they are or, with `update`, as it
    makes them.

    Args:
        tables: all weights.
        amaxes: where they are measured, and how they are reduced.
        delayed: the weights of `tables` that scale by their past. It moves on by one cast.
        unmeasured: the weights to measure, where a step has measured the others; None for all.
        codes: the weights to write codes of, where the others' are written later; None for all.
        boundary: weights whose other elements come with the reduction, beside odd cuts.
        skip: bool[1] on the device. Where it holds True nothing is written; the collective runs all
            the same.
        update: an optimizer step that the masters take first, in the pass that measures them. Where
            scales are local (`FormatSpec.casts_in_one_pass`) that pass writes the codes too, except
            of the rows of blocks that a boundary cuts.
        repeat: do the last cast once more, by its delayed scales; histories do not roll.
    """
    # This is torch.no_grad() in half of its host time.
    with torch.set_grad_enabled(False):
        amaxes.begin()
        for table in tables if unmeasured is None else unmeasured:
            table.measure(amaxes.buffer, update, skip)
        amaxes.reduce()
        if update is not None:
            update.reduce()

        if delayed.unseeded and skip is None:
            for table in tables:
                # Scales come with amaxes, which the histories take.
                table.compute_scales(amaxes.buffer, None)
            delayed.seed(lambda: _roll(tables, None))
        if not repeat:
            delayed.advance(skip)
        with delayed.replay() if repeat else NOTHING:
            for table in tables:
                table.compute_scales(amaxes.buffer, skip)
            for table in tables if codes is None else codes:
                table.cast_rest(amaxes.buffer, update, skip)
            for table in boundary:
                table.partial_cast(amaxes.buffer, skip)
        if delayed and not repeat:
            _roll(tables, skip)


def _roll(tables: Sequence[WeightTable], skip: Tensor | None) -> None:
    for table in tables:
        table.roll_history(skip)
