"""The pipeline: partial amaxes, packed, all-reduced once, scales, partial cast. All weights and formats together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerocast.cast.adam_update import AdamUpdate
from zerocast.cast.packed_amax import PackedAmax
from zerocast.cast.weight_table import Batch
from zerocast.distributed.group import Group


@torch.no_grad()
def cast(
    batches: Sequence[Batch],
    neighbours: Sequence[Batch],
    packed: PackedAmax,
    received: Tensor,
    group: Group,
    skip: Tensor | None = None,
    update: AdamUpdate | None = None,
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

    for batch in batches:
        batch.compute_scales(packed.buffer, skip)
    for batch in batches:
        batch.partial_cast(packed.buffer, skip)
    if neighbours:
        packed.received(received)
    for batch in neighbours:
        batch.partial_cast(packed.buffer, skip)
    for batch in batches:
        batch.roll_history(skip)
