"""Shards in storage of their own: the weight itself stays as it is, and so do the bytes around each shard."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests import casts
from tests.casts import POISON, Sharded, Weight
from tests.selection import examples_on
from tests.strategies import models
from tests.workers import Ranks
from zerocast import CastPlan
from zerocast.formats import Columnwise

GUARD = 8


def cast_into_shards(cases: tuple[Weight, ...], backend: str | None) -> list[tuple[int, list[Any], casts.Bytes]]:
    """Return each weight's first owned byte, the guarded storage of each direction, and the weight's own bytes."""
    here = Sharded(cases, dist.get_rank())
    storages, parts = [], []
    for index, weight in enumerate(here.weights):
        first, last = here.owned_bytes(index)
        count = 2 if weight.format.columnwise is Columnwise.OWN_GRID else 1
        guarded = [torch.full((last - first + 2 * GUARD,), POISON, dtype=torch.uint8) for _ in range(count)]
        inner = [storage[GUARD : storage.numel() - GUARD].view(weight.rowwise_data.dtype) for storage in guarded]
        storages.append(guarded)
        parts.append(None if first == last else tuple(inner) if count == 2 else inner[0])
    plan = CastPlan(here.weights, here.masters, here.starts, fsdp_shard_model_weights=parts, backend=backend)
    plan.cast()
    return [
        (here.owned_bytes(index)[0], [s.numpy() for s in storages[index]], casts.bytes_of(weight))
        for index, weight in enumerate(here.weights)
    ]


def check(ranks: Ranks, cases: tuple[Weight, ...], backend: str | None = None) -> None:
    """Check that each shard holds its bytes of the unsharded cast."""
    for rank, found in enumerate(ranks(len(cases[0].spans))(cast_into_shards, cases, backend)):
        for case, (first, storages, weight) in zip(cases, found, strict=True):
            expected = casts.expected_of_shards(case)
            for name, storage in zip(("rowwise_data", "columnwise_data"), storages, strict=False):
                inner = storage[GUARD : len(storage) - GUARD]
                casts.assert_same_bytes(
                    {name: inner}, {name: expected[name][first : first + len(inner)]}, f"{rank} {case}"
                )
                guards = np.concatenate([storage[:GUARD], storage[len(storage) - GUARD :]])
                assert (guards == POISON).all(), f"written outside the shard of rank {rank}, {case}"
                assert (weight[name] == POISON).all(), f"written into the weight beside its shard, {case}"
            scales = {name: expected[name] for name in ("rowwise_scale_inv", "amax") if name in expected}
            casts.assert_same_bytes(weight, scales, f"{rank} {case}")


@examples_on(3)
@given(world=st.sampled_from([1, 2, 3, 5]), data=st.data())
def test_shards_hold_their_bytes(ranks: Ranks, world: int, data: st.DataObject) -> None:
    check(ranks, data.draw(models(world)), data.draw(st.sampled_from(["reference", None])))
