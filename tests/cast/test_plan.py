"""CastPlan on one process: what it notices, what it leaves alone, and where it writes when things have moved."""

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests import casts
from tests.casts import lcg_matrix
from zerocast import CastPlan, QuantizedWeight, post_all_gather_processing, quantize_master_weights
from zerocast.cast import partition
from zerocast.cast.columnwise import ColumnwiseCopies
from zerocast.distributed.group import ONE_PROCESS

SHAPE = (32, 64)
NUMEL = 32 * 64


def master_of(seed: int = 0) -> Tensor:
    return torch.from_numpy(lcg_matrix(*SHAPE, seed)).reshape(-1)


def assert_is_cast_of(weight: QuantizedWeight, master: Tensor) -> None:
    """Compare all bytes, those of the columnwise copy only if the weight has one."""
    expected = casts.unsharded(str(weight.format), master.view(SHAPE), weight.dtype)
    found = casts.bytes_of(weight)
    casts.assert_same_bytes(found, {k: v for k, v in expected.items() if k in found}, str(weight.format))


def test_no_weights_is_no_work() -> None:
    plan = CastPlan([], [], [], ONE_PROCESS)
    plan.cast()
    plan.post_all_gather()


def test_a_frozen_weight_needs_no_master(backend: str) -> None:
    """A frozen weight is cast before the plan is built. The plan never writes it."""
    frozen, trained = (casts.cast_whole("nvfp4", master_of(seed).view(SHAPE)) for seed in (1, 2))
    before, master = casts.bytes_of(frozen), master_of(3)
    plan = CastPlan([frozen, trained], [None, master], [None, 0], ONE_PROCESS, backend=backend)
    plan.cast()
    plan.post_all_gather()
    casts.assert_same_bytes(casts.bytes_of(frozen), before)
    assert_is_cast_of(trained, master)


def test_an_empty_master_owns_nothing() -> None:
    weight = casts.cast_whole("fp8_current", master_of().view(SHAPE))
    before = casts.bytes_of(weight)
    for start in (None, 0, NUMEL, -1, 10 * NUMEL):
        CastPlan([weight], [torch.empty(0)], [start], ONE_PROCESS).cast()
    casts.assert_same_bytes(casts.bytes_of(weight), before)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.ones(100), "built for a master of 512 elements from 0 on, got 100"),
        (torch.ones(0), "built for a master of 512 elements from 0 on, got 0"),
        (torch.ones(512, dtype=torch.float16), "the master is torch.float16; float32 or the nominal"),
        (torch.ones(512, dtype=torch.float64), "the master is torch.float64; float32 or the nominal"),
        (torch.ones(1024)[::2], "flat and contiguous"),
    ],
    ids=["shorter", "empty", "fp16", "fp64", "strided"],
)
def test_data_that_a_master_cannot_have(backend: str, data: torch.Tensor, message: str) -> None:
    """A master of another size would be read beyond its end, one of another dtype or stride as other values."""
    weight, master = QuantizedWeight.empty((16, 32), "nvfp4"), torch.from_numpy(lcg_matrix(16, 32, 0)).view(-1)
    plan = CastPlan([weight], [master], [0], ONE_PROCESS, backend=backend)
    plan.cast()
    before, kept = casts.bytes_of(weight), master.data
    master.data = data
    with pytest.raises((TypeError, ValueError), match=message):
        plan.cast()
    casts.assert_same_bytes(casts.bytes_of(weight), before)
    master.data = 2 * kept
    plan.cast()
    plan.post_all_gather()
    casts.assert_same_bytes(casts.bytes_of(weight), casts.bytes_of(casts.cast_whole("nvfp4", 2 * kept.view(16, 32))))


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_each_of_several_masters_in_one_storage_is_followed(backend: str, on_host: bool) -> None:
    """The second one of two parameters moves, as when a model is moved piece by piece."""
    flat = torch.from_numpy(lcg_matrix(32, 32, 0)).view(-1)
    masters = [torch.nn.Parameter(flat[:512]), torch.nn.Parameter(flat[512:])]
    weights = [QuantizedWeight.empty((16, 32), "nvfp4") for _ in masters]
    with mock.patch.object(partition, "is_on_cpu", return_value=on_host):
        plan = CastPlan(weights, masters, [0, 0], ONE_PROCESS, backend=backend)
        plan.cast()
        masters[1].data = torch.from_numpy(lcg_matrix(16, 32, 5)).view(-1)
        plan.cast()
        plan.post_all_gather()
    for weight, master in zip(weights, masters, strict=True):
        whole = casts.cast_whole("nvfp4", master.detach().view(16, 32))
        casts.assert_same_bytes(casts.bytes_of(weight), casts.bytes_of(whole))


def become_one(weights: list[QuantizedWeight], masters: list[Tensor]) -> None:
    weights[0].data = weights[1].data


def overlap(weights: list[QuantizedWeight], masters: list[Tensor]) -> None:
    """Move the codes into one buffer, of which the second weight begins too early."""
    flat = torch.empty(2 * weights[0].rowwise_data.numel(), dtype=torch.uint8)
    for start, weight in zip((0, weights[0].rowwise_data.numel() - 1), weights, strict=True):
        weight.rebind(rowwise_data=flat[start:][: weight.rowwise_data.numel()].view(weight.rowwise_data.shape))


def cover_a_master(weights: list[QuantizedWeight], masters: list[Tensor]) -> None:
    codes = weights[0].rowwise_data
    weights[0].rebind(rowwise_data=masters[1].view(torch.uint8)[: codes.numel()].view(codes.shape))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (become_one, "model weights 0 and 1 are the same weight"),
        (overlap, "model weight 0 and model weight 1 share memory"),
        (cover_a_master, "model weight 0 and a master share memory|a master and model weight 0 share memory"),
    ],
)
@pytest.mark.parametrize("is_built", [False, True])
def test_weights_that_share_memory(
    spoil: Callable[[list[QuantizedWeight], list[Tensor]], None], message: str, is_built: bool
) -> None:
    """Each cast would write one weight over the other."""
    weights = [QuantizedWeight.empty(SHAPE, "nvfp4") for _ in range(2)]
    masters = [master_of(seed) for seed in range(2)]

    def build() -> CastPlan:
        plan = CastPlan(weights, masters, [0, 0], ONE_PROCESS)
        plan.cast()
        plan.post_all_gather()
        return plan

    cast = build().cast if is_built else build
    spoil(weights, masters)
    with pytest.raises(ValueError, match=message):
        cast()


def test_a_plan_may_write_shards_of_weights_that_have_no_memory_of_their_own() -> None:
    """The codes of such weights are not written, so all weights may have the same."""
    weights = [QuantizedWeight.empty(SHAPE, "nvfp4") for _ in range(2)]
    shards = [torch.empty_like(weight.rowwise_data).view(-1) for weight in weights]
    weights[1].rebind(rowwise_data=weights[0].rowwise_data)
    masters = [master_of(seed) for seed in range(2)]
    CastPlan(weights, masters, [0, 0], ONE_PROCESS, fsdp_shard_model_weights=shards).cast()
    for shard, master in zip(shards, masters, strict=True):
        assert torch.equal(shard, casts.cast_whole("nvfp4", master.view(SHAPE)).rowwise_data.view(-1))


def test_masters_may_be_other_tensors_at_every_cast(backend: str) -> None:
    """A host may make its shards again, of the same span. Another span is refused, and nothing is taken."""
    weight, master = QuantizedWeight.empty((16, 32), "nvfp4"), lcg_matrix(16, 32, 0)
    flat = torch.from_numpy(master).view(-1)
    plan = CastPlan([weight], [flat[:100].clone()], [0], ONE_PROCESS, backend=backend)
    plan.cast()
    before = casts.bytes_of(weight)
    for other in (flat[:101], None):
        with pytest.raises(
            ValueError, match=r"weight 0 \(nvfp4 .* was built for a master of 100 elements from 0 on, got"
        ):
            plan.move_masters([other])
    plan.cast()
    casts.assert_same_bytes(casts.bytes_of(weight), before)
    plan.move_masters([2 * flat[:100]])
    plan.cast()
    doubled = QuantizedWeight.empty((16, 32), "nvfp4")
    CastPlan([doubled], [2 * flat[:100]], [0], ONE_PROCESS, backend=backend).cast()
    casts.assert_same_bytes(casts.bytes_of(weight), casts.bytes_of(doubled))


def test_storage_of_the_caller_stays_when_masters_move(backend: str) -> None:
    """The storage stays until another is given. None in the list stands for the weight's own data."""
    weight, master = QuantizedWeight.empty((16, 32), "nvfp4"), torch.from_numpy(lcg_matrix(16, 32, 0)).view(-1)
    storage, other = torch.zeros(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    plan = CastPlan([weight], [master], [0], ONE_PROCESS, fsdp_shard_model_weights=[storage], backend=backend)
    untouched = weight.rowwise_data.clone()
    for step, (given, into) in enumerate([((), storage), (([other],), other), ((), other)]):
        moved = torch.from_numpy(lcg_matrix(16, 32, 1 + step))
        plan.move_masters([moved.view(-1)], *given)
        plan.cast()
        expected = casts.cast_whole("nvfp4", moved).rowwise_data
        assert torch.equal(into, expected.view(-1)) and torch.equal(weight.rowwise_data, untouched)
    plan.move_masters([moved.view(-1)], [None])
    plan.cast()
    assert torch.equal(weight.rowwise_data, expected)


def test_buffers_that_a_host_moved_are_written_there(backend: str) -> None:
    weight, master = QuantizedWeight.empty((16, 32), "fp8_current"), torch.from_numpy(lcg_matrix(16, 32, 0)).view(-1)
    plan = CastPlan([weight], [master], [0], ONE_PROCESS, backend=backend)
    plan.cast()
    old, moved = weight.rowwise_data, torch.zeros(16, 32, dtype=torch.uint8)
    expected = old.clone()
    old.zero_()
    weight.state.set_storage({"rowwise_data": moved})
    plan.cast()
    assert torch.equal(moved, expected) and not old.any()


def test_skip_leaves_everything(backend: str) -> None:
    weights, master = [QuantizedWeight.empty(SHAPE, fmt) for fmt in casts.FORMATS], master_of()
    plan = CastPlan(weights, [master] * len(weights), [0] * len(weights), ONE_PROCESS, backend=backend)
    plan.cast()
    before = [casts.bytes_of(weight) for weight in weights]
    master.mul_(2)
    plan.cast(skip=torch.tensor([True]))
    for weight, bytes_ in zip(weights, before, strict=True):
        casts.assert_same_bytes(casts.bytes_of(weight), bytes_)


def test_weights_whose_first_cast_is_skipped_have_no_value() -> None:
    weight, master = QuantizedWeight.empty(SHAPE, "nvfp4"), master_of()
    plan = CastPlan([weight], [master], [0], ONE_PROCESS)
    for _ in range(2):
        plan.cast(skip=torch.tensor([True]))
        with pytest.raises(RuntimeError, match="has never been cast"):
            weight.dequantize()
    plan.cast(skip=torch.tensor([False]))
    plan.post_all_gather()
    assert_is_cast_of(weight, master)


def test_a_plan_that_shares_a_weight_with_a_newer_one_still_marks_it_stale() -> None:
    weight, master = QuantizedWeight.empty(SHAPE, "fp8_current"), master_of()
    older = CastPlan([weight], [master], [0], ONE_PROCESS)
    newer = CastPlan([weight], [master], [0], ONE_PROCESS)
    newer.cast()
    newer.post_all_gather()
    weight.read(columnwise=True, dtype=torch.float32)
    older.cast()
    with pytest.raises(RuntimeError, match="older than its last cast"):
        weight.read(columnwise=True, dtype=torch.float32)
    older.post_all_gather()
    weight.read(columnwise=True, dtype=torch.float32)


def test_a_plan_over_cast_and_uncast_weights_knows_which_copies_are_stale() -> None:
    stale, fresh = QuantizedWeight.empty(SHAPE, "fp8_current"), QuantizedWeight.empty(SHAPE, "fp8_current")
    quantize_master_weights([stale], [master_of()], [0], ONE_PROCESS)
    post_all_gather_processing([stale])
    quantize_master_weights([stale], [master_of(1)], [0], ONE_PROCESS)
    CastPlan([stale, fresh], [None, master_of()], [None, 0], ONE_PROCESS)
    with pytest.raises(RuntimeError, match="older than its last cast"):
        stale.read(columnwise=True, dtype=torch.float32)
    post_all_gather_processing([stale])
    stale.read(columnwise=True, dtype=torch.float32)


def test_a_copied_weight_has_no_part_in_the_plan() -> None:
    weight, master = QuantizedWeight.empty(SHAPE, "nvfp4"), master_of()
    plan = CastPlan([weight], [master], [0], ONE_PROCESS)
    plan.cast()
    plan.post_all_gather()
    twin = copy.deepcopy(weight)
    before = casts.bytes_of(twin)
    master.neg_()
    plan.cast()
    casts.assert_same_bytes(casts.bytes_of(twin), before)
    twin.read(columnwise=True, dtype=torch.float32)


def test_gradients_are_never_recorded() -> None:
    weight, parameter = QuantizedWeight.empty(SHAPE, "nvfp4"), torch.nn.Parameter(master_of())
    CastPlan([weight], [parameter], [0], ONE_PROCESS).cast()
    assert weight.grad_fn is None
    assert not any(
        t.requires_grad for t in (weight.rowwise_data, weight.rowwise_scale_inv, weight.amax) if t is not None
    )


def test_columnwise_copies_follow_data_that_is_replaced() -> None:
    weight = torch.nn.Parameter(casts.cast_whole("nvfp4", master_of().view(SHAPE)))
    copies = ColumnwiseCopies([weight], "cpu")  # type: ignore[list-item]
    copies.make()
    other = casts.cast_whole("nvfp4", master_of(1).view(SHAPE))
    wanted = casts.bytes_of(other)
    other.columnwise_data.zero_()
    weight.data = other
    copies.make()
    casts.assert_same_bytes(casts.bytes_of(other), wanted)
