"""FusedAdamW.clip_grad_norm_: torch's norm, and the bits of gradients that were scaled before the step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.fsdp2 import models, test_tensor_parallel
from tests.fsdp2.models import FORMATS, Net, digests
from tests.fsdp2.test_fused_adamw import HIDDEN, WIDTH, put_gradients
from tests.workers import error_of, on_ranks
from zerocast.fsdp2 import FusedAdamW, TrainingState
from zerocast.optim.norm import clip_factor


def trainee(**options: Any) -> tuple[Any, FusedAdamW]:
    """A model and its optimizer, with gradients."""
    model = models.sharded(Net(FORMATS, WIDTH, HIDDEN))
    optimizer = FusedAdamW(model.named_parameters(), lr=1e-2, **options)
    put_gradients(model, 0)
    return model, optimizer


@pytest.mark.parametrize("moment_dtype", [torch.float32, "8bit"], ids=str)
@on_ranks(1, 3)
def test_equals_gradients_that_were_scaled(moment_dtype: Any) -> None:
    """The second step is not clipped, the norm of the third is below the limit."""
    (ours, optimizer), (theirs, scaled) = (trainee(moment_dtype=moment_dtype) for _ in range(2))
    for step, limit in enumerate((0.1, None, 1e9)):
        for model in (ours, theirs):
            put_gradients(model, step)
        gradients = [parameter.grad for parameter in theirs.parameters()]
        if limit is not None:
            norm = optimizer.clip_grad_norm_(limit)
            torch.testing.assert_close(norm, nn.utils.get_total_norm(gradients).full_tensor())
            torch._foreach_mul_([gradient.to_local() for gradient in gradients], clip_factor(norm, limit)[0])
        for each in (optimizer, scaled):
            each.step()
            each.zero_grad()
        states = (TrainingState(model, each).state_dict() for model, each in ((ours, optimizer), (theirs, scaled)))
        found, expected = map(digests, states)
        assert found == expected, f"step {step}"


@pytest.mark.parametrize("replicas", [1, 2])
@on_ranks(4)
def test_the_norm_of_slices_and_replicas(replicas: int) -> None:
    """Biases and weights are laid out differently. A rank without a gradient reduces as the others do."""
    model = test_tensor_parallel.parallel("fp8_current", hidden=256, replicas=replicas)
    model(models.batch(0, test_tensor_parallel.WIDTH, rank=0)).float().square().mean().backward()
    optimizer = FusedAdamW(model.parameters())
    expected = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).full_tensor()
    torch.testing.assert_close(optimizer.clip_grad_norm_(1.0), expected)
    if dist.get_rank() == 0:
        model.up.weight.grad = None
    shares_gradients = replicas == 1 or dist.get_rank() < 2
    assert (optimizer.clip_grad_norm_(1.0) < expected) == shares_gradients


def changed_in_place(model: Any) -> None:
    next(model.parameters()).grad.mul_(2)


def changed_locally(model: Any) -> None:
    """As GradScaler.unscale_ does."""
    next(model.parameters()).grad.to_local().mul_(2)


def replaced(model: Any) -> None:
    parameter = next(model.parameters())
    parameter.grad = parameter.grad.clone()


def dropped(model: Any) -> None:
    next(model.parameters()).grad = None


def of_another_pass(model: Any) -> None:
    model.zero_grad()
    put_gradients(model, 0)


@pytest.mark.parametrize("change", [changed_in_place, changed_locally, replaced, dropped, of_another_pass])
@on_ranks(2)
def test_gradients_that_change_after_it(change: Callable[..., None]) -> None:
    """Nothing is stepped by a factor of other gradients; a later clip or zero_grad of the optimizer ends it."""
    model, optimizer = trainee()
    optimizer.step()
    optimizer.clip_grad_norm_(0.1)
    change(model)
    before = digests(TrainingState(model, optimizer).state_dict())
    assert "gradients have changed since clip_grad_norm_" in error_of(optimizer.step)
    assert digests(TrainingState(model, optimizer).state_dict()) == before
    optimizer.clip_grad_norm_(0.1)
    optimizer.step()


@on_ranks(2)
def test_zero_grad_forgets_it() -> None:
    """As after a step that a GradScaler has skipped."""
    model, optimizer = trainee()
    optimizer.clip_grad_norm_(0.1)
    optimizer.zero_grad()
    other, unclipped = trainee()
    put_gradients(model, 0)
    for each in (optimizer, unclipped):
        each.step()
    states = (TrainingState(*pair).state_dict() for pair in ((model, optimizer), (other, unclipped)))
    found, expected = map(digests, states)
    assert found == expected


def test_unsharded_parameters() -> None:
    """Without a process group."""
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4)).square().sum().backward()
    expected = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(FusedAdamW(model.parameters()).clip_grad_norm_(1.0), expected)
