"""The pipeline of a cast: partial amaxes, one reduction, scales, codes. Weights of all formats are
cast together.

Training frameworks differ only in the amaxes that have to be reduced (`zerocast.cast.amaxes`).
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
    to_measure: Sequence[WeightTable] | None = None,
    to_code: Sequence[WeightTable] | None = None,
    boundary: Sequence[WeightTable] = (),
    skip: Tensor | None = None,
    update: AdamUpdate | None = None,
    repeat: bool = False,
) -> None:
    """Cast the owned masters of `tables` into their weights.

    Args:
        tables: all weights.
        amaxes: the buffer of their amaxes, which reduces itself over the ranks.
        delayed: the delayed scaling of those weights of `tables` that use it.
        to_measure: the weights to measure, if a step has measured the others; None for all.
        to_code: the weights to write codes of, if the other codes are written later. None for all.
        boundary: the elements of other ranks that this rank writes, whose values come with the
            reduction.
        skip: bool[1] on the device. If it holds True nothing is written, but the collective runs.
        update: an optimizer step that the masters take first, in the pass that measures them. If
            scales are local (`FormatSpec.casts_in_one_pass`) that pass writes the codes too, except
            in block rows that a boundary between ranks splits.
        repeat: True to repeat the last cast with its delayed scales. Histories do not roll.
    """
    # This is torch.no_grad() in half of its CPU time.
    with torch.set_grad_enabled(False):
        amaxes.begin()
        for table in tables if to_measure is None else to_measure:
            table.measure(amaxes.buffer, update, skip)
        amaxes.reduce()
        if update is not None and update.groups is not None:
            update.groups.reduce()

        if delayed.unseeded and skip is None:
            for table in tables:
                # The scales themselves are not used. This writes the tensor amaxes of the first
                # cast, which `seed` rolls into the histories. A cast with `skip`, whose value only
                # the device knows, does not seed: it uses the current scale, which is 1 if it was
                # never set.
                table.compute_scales(amaxes.buffer, None)
            delayed.seed(lambda: _roll(tables, None))
        has_delayed = bool(delayed)
        if has_delayed and not repeat:
            delayed.advance(skip)
        with delayed.replay() if repeat else NOTHING:
            for table in tables:
                table.compute_scales(amaxes.buffer, skip)
            for table in tables if to_code is None else to_code:
                table.cast_rest(amaxes.buffer, update, skip)
            for table in boundary:
                table.partial_cast(amaxes.buffer, skip)
        if has_delayed and not repeat:
            _roll(tables, skip)


def _roll(tables: Sequence[WeightTable], skip: Tensor | None) -> None:
    for table in tables:
        table.roll_history(skip)
