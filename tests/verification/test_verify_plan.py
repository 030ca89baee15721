"""zerocast.verify of a CastPlan over masters of the user's own: every wrong byte on any rank, with odd cuts and delayed scales."""

import pytest
import torch
import torch.distributed as dist

import zerocast
from tests import casts
from tests.cast.test_collectives import SHAPE, cut, every_format
from tests.casts import Sharded, Weight
from tests.workers import on_ranks
from zerocast import CastPlan, QuantizedWeight, VerificationError, verify


@on_ranks(2)
def test_every_byte_counts() -> None:
    """All is well after two casts; a flipped byte in each buffer is found."""
    here, culprit = Sharded(every_format(2, 3)[::4], dist.get_rank()), 1
    plan = CastPlan(here.weights, here.masters, here.starts)
    for step in range(2):
        here.set_masters(step)
        plan.cast()
        here.gather()
        plan.post_all_gather()
        assert verify(plan).ok
    for index, weight in enumerate(here.weights):
        for buffer, tensor in weight.state.buffers.items():
            if tensor is None or (buffer == "columnwise_scale_inv" and tensor.shape == (1,)):
                continue  # one scale serves both directions
            at = (tensor.numel() * tensor.element_size() - 1) * (index % 2)
            flat = tensor.view(-1).view(torch.uint8)
            flat[at] ^= dist.get_rank() == culprit
            found = [(d.name, d.rank, d.buffer, d.wrong, d.offset) for d in verify(plan).differences[:1]]
            assert found == [(f"weight {index}", culprit, buffer, 1, at)]
            flat[at] ^= dist.get_rank() == culprit
    assert verify(plan).ok


def test_one_matrix_of_several_is_named_by_its_number() -> None:
    weight, master = QuantizedWeight.empty((3, 32, 64), "fp8_block"), torch.randn(3 * 32 * 64)
    plan = CastPlan([weight], [master], [0])
    plan.cast()
    plan.post_all_gather()
    weight.rowwise_data.view(-1)[-1] ^= 1
    assert [(found.name, found.buffer) for found in verify(plan).differences] == [("weight 0[2]", "rowwise_data")]


@pytest.mark.parametrize("buffer", ["rowwise_data", "rowwise_scale_inv"])
@on_ranks(2)
def test_memory_that_was_freed_is_not_read(buffer: str) -> None:
    """On one rank, which reads no byte, and all raise."""
    here = Sharded((Weight("fp8_block", SHAPE, cut(2), torch.bfloat16),), dist.get_rank())
    plan = CastPlan(here.weights, here.masters, here.starts)
    plan.cast()
    if dist.get_rank() == 1:
        getattr(here.weights[0], buffer).untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"{buffer} of weight 0 ends at byte"):
        verify(plan)


@on_ranks(2)
def test_weights_with_gaps_are_left_out() -> None:
    """Elements that nobody has a master of: no cast of them is known."""
    weights = [QuantizedWeight.empty(SHAPE, fmt) for fmt in ("fp8_block", "nvfp4")]
    first, last = cut(2)[dist.get_rank()]
    numel = last - first
    plan = CastPlan(weights, [torch.randn(numel), torch.randn(numel - 32)], [first, first])
    plan.cast()
    for weight in weights:
        data = weight.rowwise_data.view(-1)
        zerocast.distributed.group.Group.of(None).all_gather_into(data, data.view(2, -1)[dist.get_rank()])
    plan.post_all_gather()
    report = verify(plan)
    assert report.ok
    assert report.weights == 1
    assert report.without_masters == ("weight 1",)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("fmt", casts.FORMATS)
@pytest.mark.notices(
    "`zerocast.verify` finds masters that are NaN or Inf",
    where=("CastPlan", "ZeroAdamW"),
    answer="fails and names them, unless `allow_nonfinite`",
)
def test_masters_that_are_not_finite_fail(fmt: str, value: float) -> None:
    """They are cast as the format says, which is no difference; the report names them and fails, unless told otherwise."""
    weight, master = QuantizedWeight.empty(SHAPE, fmt), torch.randn(SHAPE[0] * SHAPE[1])
    master[[5, 77]] = value
    plan = CastPlan([weight], [master], [0])
    plan.cast()
    plan.post_all_gather()
    report = verify(plan)
    assert not report.ok and not report.differences
    with pytest.raises(VerificationError, match="the master of weight 0 has 2 elements that are NaN or Inf"):
        report.raise_for_differences()
    report = verify(plan, allow_nonfinite=True)
    report.raise_for_differences()
    assert report.ok
    assert report.not_finite == (("weight 0", 2),)
    assert "the master of weight 0 has 2 elements that are NaN or Inf" in str(report)
