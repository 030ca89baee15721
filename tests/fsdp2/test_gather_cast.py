"""Codes that are cast at each gather or kept between casts: the same bytes, how often they are cast,
and what is left of them.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

import zerocast
from tests.fsdp2 import models, test_loops
from tests.fsdp2.models import Net
from tests.workers import on_ranks
from zerocast.cast.tables import WeightTable
from zerocast.fsdp2 import plan, torch_fsdp


@pytest.mark.parametrize("lacking", [0, 1])
@on_ranks(2)
def test_few_codes_are_kept_by_default(lacking: int) -> None:
    codes = 2 * 64 * 96 // 2 // 2  # of two weights, half a byte an element, on two ranks
    with mock.patch.object(plan, "MOST_KEPT", codes - lacking):
        for told, kept in ((None, not lacking), (False, False), (True, True)):
            model = models.sharded(Net(("nvfp4",), 64, 96), keep_codes=told)
            zerocast.fsdp2.refresh(model)
            assert [group.keep_codes for group in models.manager(model).plan.cast_groups] == [kept]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("keep_codes", [False, True])
@on_ranks(2)
def test_casts_of_codes(keep_codes: bool, micro_batches: int) -> None:
    """Of three blocks, gathered for the forward pass and for the backward pass: at each gather one launch for the two weights
    of a block, and nothing is left; or one launch a step.
    """
    model: Any = models.sharded(Net(("nvfp4",) * 3, 64, 96), keep_codes=keep_codes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    name = "cast_rest" if keep_codes else "partial_cast"
    for step in range(3):
        made = mock.patch.object(WeightTable, name, autospec=True, side_effect=getattr(WeightTable, name))
        with made as launched:
            for index in range(micro_batches):
                model(models.batch(10 * step + index, 64).requires_grad_()).float().square().mean().backward()
        counts.append(launched.call_count)
        optimizer.step()
        optimizer.zero_grad()
    groups = models.manager(model).plan.param_groups.prepared
    left = {codes.untyped_storage() for group in groups for parts in group._outgoing for codes in parts}
    assert counts[1:] == [1 if keep_codes else 3 * 2 * micro_batches] * 2
    assert keep_codes or sum(storage.nbytes() for storage in left) == 0


@on_ranks(2)
def test_steps_within_a_backward_pass_keep_codes() -> None:
    model: Any = models.sharded(test_loops.Rooted())
    test_loops.loss(model, 0).backward()
    assert not models.manager(model).plan.keep_codes
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, step=optimizer.step: step())
    test_loops.loss(model, 1).backward()
    models.check(model, "stepped within")
    assert models.manager(model).plan.keep_codes


@on_ranks(2)
def test_a_hook_at_the_second_gather_is_refused() -> None:
    """A torch whose FSDP2 does not ask `GatheredByGroup` would fill the scales of nothing."""
    model: Any = models.sharded(Net(("nvfp4",), 64, 96), reshard_after_forward=True)
    model(models.batch(0, 64))
    for group in torch_fsdp.groups(model):
        for param in group.fsdp_params:
            param.__class__ = FSDPParam
    with pytest.raises(RuntimeError, match="calls the hook of"):
        model(models.batch(1, 64))
