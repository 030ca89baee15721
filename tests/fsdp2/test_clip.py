"""FusedAdamW.clip_grad_norm_: torch's norm and factor, also together with torch's clips and on one rank's mistakes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import zerocast
from tests.fsdp2 import models, test_tensor_parallel
from tests.fsdp2.models import Net, digests
from tests.fsdp2.test_fused_adamw import HIDDEN, WIDTH, put_gradients
from tests.workers import error_of, on_ranks
from zerocast.fsdp2 import FusedAdamW, TrainingState
from zerocast.optim.norm import clip_factor


def trainee(**options: Any) -> tuple[Any, FusedAdamW]:
    """A model and its optimizer, with gradients."""
    model = models.sharded(Net(("nvfp4", "fp8_block", "mxfp8"), WIDTH, HIDDEN))
    optimizer = FusedAdamW(model.named_parameters(), lr=1e-2, **options)
    put_gradients(model, 0)
    return model, optimizer


def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.to_local() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(1, 3)
def test_scales_gradients(dtype: torch.dtype) -> None:
    """The second norm is below the limit. Some shards are empty."""
    model, optimizer = trainee()
    for parameter in model.parameters():
        given, parameter.grad = parameter.grad, None
        parameter.grad_dtype, parameter.grad = dtype, given.to(dtype)
    for limit in (0.1, 1e9):
        gradients = [parameter.grad for parameter in model.parameters()]
        expected = nn.utils.get_total_norm([gradient.float() for gradient in gradients]).full_tensor()
        scaled = [gradient.clone() for gradient in local_gradients(model)]
        norm = optimizer.clip_grad_norm_(limit)
        torch.testing.assert_close(norm, expected)
        torch._foreach_mul_(scaled, clip_factor(norm, limit)[0])
        assert all(map(torch.equal, local_gradients(model), scaled))


@on_ranks(2)
def test_clips_and_unscales_of_torch_after_it() -> None:
    """Neither advances a version of a DTensor. The step takes what they have left."""
    (ours, optimizer), (theirs, other) = trainee(), trainee()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    optimizer.clip_grad_norm_(1.0)
    nn.utils.clip_grad_norm_(ours.parameters(), 0.1)
    scaler.unscale_(optimizer)
    left = nn.utils.get_total_norm([parameter.grad for parameter in ours.parameters()]).full_tensor()
    torch.testing.assert_close(left, torch.tensor(0.1 / 4))
    for own, given in zip(theirs.parameters(), ours.parameters(), strict=True):
        own.grad = given.grad.clone()
    for each in (optimizer, other):
        each.step()
    states = (TrainingState(*pair).state_dict() for pair in ((ours, optimizer), (theirs, other)))
    found, expected = map(digests, states)
    assert found == expected


@pytest.mark.parametrize("replicas", [1, 2])
@on_ranks(4)
def test_the_norm_of_slices_and_replicas(replicas: int) -> None:
    """Biases and weights are laid out differently. A rank without a gradient reduces as the others do."""
    model = test_tensor_parallel.parallel("fp8_current", hidden=256, replicas=replicas)
    model(models.batch(0, test_tensor_parallel.WIDTH, rank=0)).float().square().mean().backward()
    optimizer = FusedAdamW(model.parameters())
    expected = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).full_tensor()
    torch.testing.assert_close(optimizer.clip_grad_norm_(1e9), expected)
    if dist.get_rank() == 0:
        model.up.weight.grad = None
    shares_gradients = replicas == 1 or dist.get_rank() < 2
    assert (optimizer.clip_grad_norm_(1e9) < expected) == shares_gradients


@pytest.mark.parametrize("placements", [None, (Replicate(),)], ids=str)
@on_ranks(2)
def test_gradients_that_are_laid_out_otherwise(placements: Any) -> None:
    """On one rank, whose error leaves no other rank waiting."""
    model, optimizer = trainee()
    wrong = next(model.parameters())
    whole = wrong.grad.redistribute(placements=(Replicate(),))
    if dist.get_rank() == 0:
        wrong.grad = whole if placements else whole.to_local()
        error = error_of(lambda: optimizer.clip_grad_norm_(1.0))
        assert "of a parameter with placements (Shard(dim=0),) has placements" in error
    else:
        assert optimizer.clip_grad_norm_(1.0).isnan()


@on_ranks(2)
def test_a_gradient_that_is_not_contiguous() -> None:
    """On one rank, whose error leaves no other rank waiting."""
    model, optimizer = trainee()
    if dist.get_rank() == 0:
        gradient = next(p for p in model.parameters() if p.dim() == 2).grad
        gradient._local_tensor = gradient._local_tensor.t().contiguous().t()
        assert error_of(lambda: optimizer.clip_grad_norm_(1.0)).startswith("RuntimeError: view size is not compatible")
    else:
        assert optimizer.clip_grad_norm_(1.0).isnan()


@on_ranks(2)
def test_steps_by_sums_that_are_not_reduced() -> None:
    """As tensor parallelism without data parallelism leaves gradients of replicated parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    optimizer = FusedAdamW([parameter])
    parameter.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    assert "with placements (Replicate(),) has placements (Partial(sum),)" in error_of(optimizer.step)
    assert torch.equal(parameter.to_local(), torch.ones(4))
    parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
    optimizer.step()


@on_ranks(2)
def test_limits_that_differ_between_ranks() -> None:
    _, optimizer = trainee()
    zerocast.set_debug(True)
    try:
        error = error_of(lambda: optimizer.clip_grad_norm_(1.0 + dist.get_rank()))
    finally:
        zerocast.set_debug(False)
    assert "rank 0 clips gradients to 1.0, rank 1 clips gradients to 2.0" in error


@on_ranks(2)
def test_in_a_compiled_function() -> None:
    _, optimizer = trainee()
    expected = optimizer.clip_grad_norm_(1e9)
    clip = torch.compile(lambda limit: optimizer.clip_grad_norm_(limit), backend="eager")
    assert torch.equal(clip(1e9), expected)


def test_unsharded_parameters() -> None:
    """Without a process group. Without gradients the norm is zero."""
    model = nn.Linear(4, 4)
    optimizer = FusedAdamW(model.parameters())
    assert optimizer.clip_grad_norm_(1.0) == 0
    model(torch.ones(2, 4)).square().sum().backward()
    expected = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(optimizer.clip_grad_norm_(1.0), expected)
