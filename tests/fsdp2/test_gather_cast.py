"""Codes that are cast at each gather or kept between casts: the same bytes, how often they are cast,
and what is left of them.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

import zerocast
from tests.fsdp2 import models, test_bits, test_loops
from tests.fsdp2.models import FEW, FORMATS, Net
from tests.workers import Ranks
from zerocast.cast.tables import WeightTable
from zerocast.fsdp2 import plan, torch_fsdp


@pytest.mark.parametrize(("world", "formats"), [(3, FEW), *(models.slow(world, FORMATS) for world in (2, 3))], ids=str)
def test_kept_codes_are_the_unsharded_cast(ranks: Ranks, world: int, formats: tuple[str, ...]) -> None:
    test_bits.check(ranks, world, formats, 64, 96, {"keep_codes": True})


def kept_by_default(most: int) -> list[bool]:
    """Whether codes are kept where all may take so many bytes, by what prepare is told."""
    found = []
    with mock.patch.object(plan, "MOST_KEPT", most):
        for keep_codes in (None, False, True):
            model = models.sharded(Net(("nvfp4",), 64, 96), keep_codes=keep_codes)
            zerocast.fsdp2.refresh(model)
            found += [group.keep_codes for group in models.manager(model).plan.cast_groups]
    return found


def test_few_codes_are_kept_by_default(ranks: Ranks) -> None:
    codes = 2 * 64 * 96 // 2 // 2  # of two weights, half a byte an element, on two ranks
    assert ranks(2)(kept_by_default, codes) == [[True, False, True]] * 2
    assert ranks(2)(kept_by_default, codes - 1) == [[False, False, True]] * 2


def casts(keep_codes: bool, micro_batches: int) -> tuple[list[int], int]:
    """Launches that make codes in a step of so many micro-batches, for each of two steps, and the
    bytes of codes that are left of it.
    """
    model: Any = models.sharded(Net(("nvfp4",) * 3, 64, 96), keep_codes=keep_codes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for step in range(3):
        made = mock.patch.object(WeightTable, "partial_cast", autospec=True, side_effect=WeightTable.partial_cast)
        with made as launched:
            for index in range(micro_batches):
                model(models.batch(10 * step + index, 64).requires_grad_()).float().square().mean().backward()
        counts.append(launched.call_count)
        optimizer.step()
        optimizer.zero_grad()
    groups = models.manager(model).plan.param_groups.prepared
    left = {codes.untyped_storage() for group in groups for parts in group._outgoing for codes in parts}
    return counts[1:], sum(storage.nbytes() for storage in left)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_cast_of_codes_for_each_gather(ranks: Ranks, micro_batches: int) -> None:
    """Three blocks, gathered for the forward pass and for the backward pass; one launch for the
    two weights of each.
    """
    for counts, left in ranks(2)(casts, False, micro_batches):
        assert counts == [3 * 2 * micro_batches] * 2
        assert left == 0
    for counts, _ in ranks(2)(casts, True, micro_batches):
        assert counts == [1, 1]


def kept_after_steps_within() -> tuple[list[bool], list[str]]:
    """Whether codes are kept before steps within a backward pass and after the next cast, and
    complaints.
    """
    model: Any = models.sharded(test_loops.Rooted())
    test_loops.loss(model, 0).backward()
    kept = [models.manager(model).plan.keep_codes]
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, step=optimizer.step: step())
    test_loops.loss(model, 1).backward()
    found = models.complaints(model, "stepped within")
    return [*kept, models.manager(model).plan.keep_codes], found


def test_steps_within_a_backward_pass_keep_codes(ranks: Ranks) -> None:
    assert ranks(2)(kept_after_steps_within) == [([False, True], [])] * 2


def hooks_at_the_second_gather() -> str:
    """What a forward pass says where FSDP2 goes on with the hooks of single weights."""
    model: Any = models.sharded(Net(("nvfp4",), 64, 96), reshard_after_forward=True)
    model(models.batch(0, 64))
    for group in torch_fsdp.groups(model):
        for param in group.fsdp_params:
            param.__class__ = FSDPParam
    with pytest.raises(RuntimeError) as error:
        model(models.batch(1, 64))
    return str(error.value)


def test_a_hook_at_the_second_gather_is_refused(ranks: Ranks) -> None:
    """A torch whose FSDP2 does not ask `GatheredByGroup` would fill the scales of nothing."""
    assert all("calls the hook of" in said for said in ranks(2)(hooks_at_the_second_gather))
